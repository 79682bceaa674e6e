"""What a decode step of a stage costs: each of its layers, and what the first and the last stage do besides.

    stage = every_stage + sum of its layers  (+ first_stage)  (+ last_stage)

Costs are estimated, or measured; only their ratios matter for cutting the layers into stages. On a CPU a decode step
costs what reading its weights does. On a GPU the gaps between small kernels and the start of each cost as much, however
small the weights are: docs/design/0048-layers-of-a-gpu-stage.md. Layers with experts cost the more the more tokens a
step has, since these read more of the experts: by default stages are cut for `DECODE_ROWS` rows. Prompts that a step
computes besides make layers slower, and not the LM head: docs/design/0195-layers-for-traffic.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from operator import add, mul

from raypp.models.attention_config import AttentionConfig, GatedDeltaConfig, LayerMixer
from raypp.models.config import ModelConfig
from raypp.models.sizes import LayerSize, kv_bytes_read, layer_sizes, lm_head_bytes
from raypp.ops.sample.draw_sizes import exchanged_bytes
from raypp.plan.hardware import H200, Gpu
from raypp.scheduler.step_budget import RooflineCost, StageTimes, StepWork, amounts, step_ms

FREE_STEP_TOKENS = {"cuda": 184, "cpu": 12}
"""Tokens that take as long to compute as to read what they are multiplied by, by device: measured, see
docs/design/0051-how-many-drafts.md."""

DECODE_ROWS = 32
"""Rows of a decode step that stages are cut for, without a measurement: about those of the constants below."""
_GPU_BYTES_PER_MS = 4.3e9  # what an H200 reads in long stretches
_GPU_LAYER_MS = 0.035  # of a decode layer beyond reading its weights, 8 to 64 rows
_GPU_LATENT_MS = 0.03  # besides, where keys and values are of latents: launches; GLM-4.7-Flash, 1 row, 4.87 ms a token
_GPU_LATENT_FLOPS_PER_MS = 2.7e11  # of decode rows over latents, 16 to 128 rows of 8,192 tokens
_LATENT_TILE = 16  # heads of queries: products over latents are of so many, and of multiples
_GPU_HEAD_MS = 0.05  # of norm, LM head, choosing tokens and writing what is fed back, 8 to 64 rows
_GPU_DRAFT_MS = 0.007  # of either, for every draft that each row verifies besides its token, 8 to 32 rows
_GPU_SCAN_MS = 2.7  # of a host that starts a gated delta net's scan of a chunk, per layer
_CHUNK_TOKENS = 512
_MOST_CHUNKS = 8
_GPU_PROPOSAL_MS = 0.076  # of a draft by a head beyond reading its weights, 8 to 32 rows
_SUM_US = ((1, 3.3), (16, 4.3), (64, 7.5), (128, 12.0), (256, 30.0))
"""What a sum over members takes, by rows of 4,096 numbers in 16 bits: measured with two over NVLink. More rows take as
much more."""
_SUM_COLUMNS = 4096
_DRAW_MS, _DRAWN_BYTES_PER_MS = 0.05, 2e8  # of the exchanges by which members draw, over NVLink: an estimate


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """The costs of one decode step, in one unit, milliseconds or bytes."""

    layers: Sequence[float]  # of each layer
    every_stage: float = 0.0  # receiving, positions, block tables, sending
    first_stage: float = 0.0  # beyond that: feedback, the embedding
    last_stage: float = 0.0  # beyond that: norm, LM head, sampling

    def of_stages(self, num_layers: Sequence[int]) -> list[float]:
        """Return what each stage costs, given how many layers each has."""
        ends = [0, *accumulate(num_layers)]
        costs = [self.every_stage + sum(self.layers[start:end]) for start, end in pairwise(ends)]
        costs[0] += self.first_stage
        costs[-1] += self.last_stage
        return costs


def step_duration(num_bytes: float, model: ModelConfig, *, on_gpu: bool) -> float:
    """Return what a step through all layers and the LM head costs that reads so many bytes, in `estimated_costs`' unit.

    Args:
        num_bytes: Of weights.
        model: Its layers.
        on_gpu: Where it runs.
    """
    if not on_gpu:
        return num_bytes
    return num_bytes / _GPU_BYTES_PER_MS + sum(map(_layer_ms, model.attention)) + _GPU_HEAD_MS


def _layer_ms(layer: LayerMixer) -> float:
    """Return what a decode layer takes on a GPU beyond reading its weights, milliseconds."""
    return _GPU_LAYER_MS + _GPU_LATENT_MS * _has_latents(layer)


def _has_latents(layer: LayerMixer) -> bool:
    return isinstance(layer, AttentionConfig) and layer.latent is not None


def _seen_ms(
    layer: LayerMixer, num_queries: float, num_bytes: float, bytes_per_ms: float, latent_flops_per_ms: float
) -> float:
    """Return what attention of a decode row with so many queries takes for each token that it sees, milliseconds.

    All heads multiply the latents that are read once for them, so many heads take longer than the memory.
    """
    reading = num_bytes / bytes_per_ms
    if not (isinstance(layer, AttentionConfig) and layer.latent is not None):
        return reading
    num_products = _LATENT_TILE * math.ceil(layer.num_heads * num_queries / _LATENT_TILE)
    return max(reading, 2.0 * num_products * (layer.latent.width + layer.latent.rank) / latent_flops_per_ms)


def estimated_costs(
    model: ModelConfig,
    dtype_bytes: int,
    *,
    on_gpu: bool = False,
    num_rows: int = DECODE_ROWS,
    num_prompt_tokens: float = 0,
    num_verified: float = 0,
    num_proposed: float = 0,
    drafting_bytes: float = 0,
    num_seen: Sequence[float] | None = None,
    kv_dtype_bytes: int = 2,
    gpu: Gpu | None = None,
) -> StepCosts:
    """Return the costs of a decode step, of one member of each stage.

    It reads every weight once, but of the embedding only a few rows, and of experts those that any of its tokens
    chooses. In milliseconds if `on_gpu`, else in bytes. On GPUs sums over members count, too.

    Args:
        model: Its sizes, or those of one member.
        dtype_bytes: Of a weight.
        on_gpu: Where it runs.
        num_rows: Of the step that decode; it matters where there are experts, or prompts.
        num_prompt_tokens: Of the step.
        num_verified: Drafts that each row verifies.
        num_proposed: Drafts that a head on the last stage makes for each row; 0 without one.
        drafting_bytes: What it reads for them.
        num_seen: Tokens that all rows together see in each layer, of the KV cache; None: not counted.
        kv_dtype_bytes: Of an element of the KV cache.
        gpu: Whose times they are; where nothing is known of it, an H200's.
    """
    num_decode_tokens = num_rows * (1 + num_verified)
    num_tokens = num_decode_tokens + num_prompt_tokens
    speed = (None if gpu is None else gpu.speed) or H200
    bytes_per_ms = _GPU_BYTES_PER_MS * speed.bytes_per_s / H200.bytes_per_s
    free_tokens = float(FREE_STEP_TOKENS["cpu"])
    if on_gpu:
        free_tokens = FREE_STEP_TOKENS["cuda"] * speed.flops_per_byte / H200.flops_per_byte
    roofline = RooflineCost(free_tokens)
    growth = roofline(num_tokens) / roofline(num_decode_tokens)
    sizes = layer_sizes(model, dtype_bytes)
    layers = [growth * size.reads.of(num_tokens) for size in sizes]
    of_token = kv_bytes_read(model, kv_dtype_bytes)
    num_seen = num_seen or [0.0] * model.num_layers
    head = float(lm_head_bytes(model, dtype_bytes) + drafting_bytes)
    if not on_gpu:
        seen = map(mul, num_seen, of_token)
        return StepCosts(layers=list(map(add, layers, seen)), last_stage=head)
    flops_per_ms = _GPU_LATENT_FLOPS_PER_MS * speed.flops / H200.flops
    verify_ms = num_verified * _GPU_DRAFT_MS
    head_ms = _GPU_HEAD_MS + verify_ms + num_proposed * _GPU_PROPOSAL_MS
    if model.num_members > 1:
        head_ms += _DRAW_MS + num_decode_tokens * exchanged_bytes(model.num_members) / _DRAWN_BYTES_PER_MS
    return StepCosts(
        layers=[
            num_bytes / bytes_per_ms
            + _layer_ms(layer)
            + verify_ms
            + layer_sums_ms(model, size, num_tokens)
            + seen * _seen_ms(layer, 1 + num_verified, kv_bytes, bytes_per_ms, flops_per_ms)
            for layer, size, num_bytes, seen, kv_bytes in zip(
                model.attention, sizes, layers, num_seen, of_token, strict=True
            )
        ],
        last_stage=head / bytes_per_ms + head_ms,
    )


def layer_sums_ms(model: ModelConfig, size: LayerSize, num_tokens: float) -> float:
    """Return what the sums of a layer over the members of a stage take on GPUs, milliseconds; 0 of one member."""
    return (model.num_members > 1) * sum((sum_ms(num_tokens * each / _SUM_COLUMNS) for each in size.summed), 0.0)


def sum_ms(num_rows: float) -> float:
    """Return what a sum over the members of a stage takes on GPUs, milliseconds; a row has 4,096 numbers."""
    for (fewer, fewer_us), (more, more_us) in pairwise(_SUM_US):
        if num_rows <= more:
            return (fewer_us + (more_us - fewer_us) * max(0.0, num_rows - fewer) / (more - fewer)) / 1000
    return more_us * num_rows / more / 1000


_NEXT_TO_NOTHING = 1.0
"""Bytes or operations, in place of none: what is estimated to take no time is never learned."""


@dataclass(frozen=True, kw_only=True)
class _Device:
    """Guesses of a device's speed, before the first step is measured; see `StepPredictor`."""

    bytes_per_ms: float
    kv_bytes_per_ms: float
    attention_flops_per_ms: float
    step_ms: float  # of every step of a stage
    layer_ms: float  # of every layer: what starting its operations takes
    prompts_ms: float  # of every layer of a step with prompts, besides
    row_ms: float  # of every layer and decode row
    token_share: float = 0.1  # of a token's products, what norms and the like take

    def like(self, gpu: Gpu) -> _Device:
        """Return the guesses for another GPU than an H200, if something is known of it."""
        speed = gpu.speed or H200
        reading, computing = speed.bytes_per_s / H200.bytes_per_s, speed.flops / H200.flops
        return replace(
            self,
            bytes_per_ms=self.bytes_per_ms * reading,
            kv_bytes_per_ms=self.kv_bytes_per_ms * reading,
            attention_flops_per_ms=self.attention_flops_per_ms * computing,
        )

    def layer(self, size: LayerSize, pairs_flops: float, kv_bytes: float, free_tokens: float) -> StageTimes:
        weights = size.reads.always / self.bytes_per_ms
        return StageTimes(
            step=self.layer_ms,
            prompts=self.prompts_ms,
            weights=weights,
            token=self.token_share * weights / free_tokens,
            logit=self.row_ms,
            kv=max(kv_bytes, _NEXT_TO_NOTHING) / self.kv_bytes_per_ms,
            pair=max(pairs_flops, _NEXT_TO_NOTHING) / self.attention_flops_per_ms,
        )


_GPU = _Device(
    bytes_per_ms=_GPU_BYTES_PER_MS,
    kv_bytes_per_ms=_GPU_BYTES_PER_MS,
    attention_flops_per_ms=4.8e11,
    step_ms=_GPU_HEAD_MS,
    layer_ms=0.012,
    prompts_ms=0.03,
    row_ms=0.00025,
)
_CPU = _Device(  # fitted to steps of `tiny` on two cores
    bytes_per_ms=2e7,
    kv_bytes_per_ms=6e6,
    attention_flops_per_ms=5e7,
    step_ms=0.3,
    layer_ms=0.1,
    prompts_ms=0.15,
    row_ms=0.015,
)


def estimated_times(
    model: ModelConfig,
    num_layers: Sequence[int],
    dtype_bytes: int,
    kv_dtype_bytes: int,
    *,
    free_tokens: float,
    gpus: Sequence[Gpu] | None = None,
) -> list[StageTimes]:
    """Return what the parts of a step take on every stage, about, in milliseconds.

    Args:
        model: Its sizes.
        num_layers: Of each stage.
        dtype_bytes: Of a weight.
        kv_dtype_bytes: Of an element of the KV cache.
        free_tokens: Tokens that take as long to compute as the weights to read.
        gpus: Of each stage; None: some CPU.
    """
    # What a window leaves out is counted, too: measured steps correct it.
    flops = map(_pair_flops, model.attention)
    layers = list(zip(layer_sizes(model, dtype_bytes), flops, kv_bytes_read(model, kv_dtype_bytes), strict=True))
    devices = [_CPU] * len(num_layers) if gpus is None else [_GPU.like(gpu) for gpu in gpus]
    ends = [0, *accumulate(num_layers)]
    found = []
    for device, (start, end) in zip(devices, pairwise(ends), strict=True):
        of_layers = [device.layer(*layer, free_tokens) for layer in layers[start:end]]
        times = StageTimes(*map(sum, zip(*of_layers, strict=True)))
        times = times._replace(step=times.step + device.step_ms)
        if end == ends[-1]:  # the head is read for every step, and not multiplied by a prompt's tokens
            head_ms = lm_head_bytes(model, dtype_bytes) / device.bytes_per_ms
            times = times._replace(step=times.step + head_ms, logit=times.logit + head_ms / free_tokens)
        found.append(times)
    return found


def min_prefill_chunk(model: ModelConfig, times: Sequence[StageTimes], roofline: RooflineCost, *, on_gpu: bool) -> int:
    """Return the tokens that no chunk of a prompt should fall below: for these a stage computes as long as it starts.

    Args:
        model: Its layers.
        times: Of the stages; see `estimated_times`.
        roofline: How the time of products grows with tokens.
        on_gpu: Where it runs.
    """
    num_states = sum(isinstance(layer, GatedDeltaConfig) for layer in model.attention)
    if not (on_gpu and num_states):
        return _CHUNK_TOKENS

    def ms_of(stage: StageTimes, num_tokens: int) -> float:
        return step_ms(stage, amounts(StepWork(num_prompt_tokens=num_tokens), roofline))

    slowest_ms = max(ms_of(stage, _CHUNK_TOKENS) - ms_of(stage, 0) for stage in times)
    scans_ms = _GPU_SCAN_MS * num_states / len(times)
    return _CHUNK_TOKENS * min(_MOST_CHUNKS, max(1, math.ceil(scans_ms / slowest_ms)))


def _pair_flops(layer: LayerMixer) -> float:
    """Return the operations for a query and a token that it sees; a state is as large whatever a row's length."""
    return 2.0 * layer.num_heads * (layer.head_dim + layer.v_dim) if isinstance(layer, AttentionConfig) else 0.0


def slice_bytes(num_bytes: int, num_members: int) -> int:
    """Return about what each member of a stage sends of a message to another node: together they send it once."""
    return -(-num_bytes // num_members)


def parts_of(
    few_ms: Sequence[float], more_ms: Sequence[float], few: int, more: int
) -> tuple[float, float, float, float]:
    """Return the times of a layer, and of what the first stage, every stage and the last one do besides, in ms.

    What is of the first and the last stage is beyond what is of every one. None is negative: what takes less time than
    measurements differ by takes none, and a layer takes a nanosecond.

    Args:
        few_ms: Of the first, a middle and the last stage, with `few` layers each.
        more_ms: The same, with `more` layers.
        few: Layers.
        more: Layers.
    """
    differences = [b - a for a, b in zip(few_ms, more_ms, strict=True)]
    layer_ms = max(sum(differences) / (len(differences) * (more - few)), 1e-6)
    first_ms, middle_ms, last_ms = (
        max(((a - few * layer_ms) + (b - more * layer_ms)) / 2, 0.0) for a, b in zip(few_ms, more_ms, strict=True)
    )
    return layer_ms, max(first_ms - middle_ms, 0.0), middle_ms, max(last_ms - middle_ms, 0.0)

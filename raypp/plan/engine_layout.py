"""What an engine is to be before its KV blocks are counted: device, type, layers, and what else each stage holds.

It can be had also where the memory does not suffice, so that `raypp info` can say what is too large.

A device that cannot multiply the form of the weights (FP8, INT8, ...) holds them in the activations' type; sizes count
those bytes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import add
from pathlib import Path

from raypp.config.engine_config import EngineConfig
from raypp.errors import ConfigError, ResourceError
from raypp.models.config import ModelConfig, as_stored, load_model_config
from raypp.models.draft_head_config import DraftHeadConfig
from raypp.models.member_sizes import of_one_member
from raypp.models.quantization import ONLINE_FP8
from raypp.models.sizes import kv_bytes_per_token, parameter_counts, state_bytes_per_row
from raypp.ops.sample.draw_sizes import MAX_REPORTED
from raypp.plan.encoder_plan import EncoderPlan, plan_encoders
from raypp.plan.hardware import Hardware, StageGpus, gpus_of_stages
from raypp.plan.layer_partition import LayerRoom, costs_of, layer_room, layers_per_stage
from raypp.plan.speculation_plan import (
    draft_head,
    draft_head_bytes,
    draft_head_spec,
    ngram_window,
    speculation_bytes,
)
from raypp.plan.stage_memory import (
    StageMemory,
    block_mix,
    memory_of_stages,
    num_snapshots,
    stage_weight_bytes,
    with_fitting_rows,
)
from raypp.stage.stage_spec import DraftHeadSpec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
_LOG = logging.getLogger(__name__)
_FP8 = "float8_e4m3fn"


@dataclass(frozen=True, kw_only=True)
class EngineLayout:
    """An engine without its KV blocks."""

    asked: EngineConfig
    config: EngineConfig  # the same, but for what states of rows change: how many requests run, no prefix cache
    model_path: str
    model: ModelConfig
    num_parameters: tuple[int, int]  # of the whole model, and those that a token is multiplied by
    held_model: ModelConfig  # with the form that its weights have on the device: what sizes are counted of
    dtype: str
    kv_dtype: str  # of the KV cache
    device: str
    num_threads: int  # compute threads of a stage
    ngram_window: int  # 0 without speculation
    draft_head: DraftHeadSpec | None
    held_head: DraftHeadConfig | None  # the same with the form on the device
    draft_head_bytes: int  # of weights, on the last stage
    encoders: EncoderPlan
    gpus: tuple[StageGpus, ...]  # of each stage
    layers: tuple[int, ...]  # of each stage
    memory: tuple[StageMemory, ...]  # of each stage

    @property
    def dtype_bytes(self) -> int:
        """Bytes of a weight, and of an activation."""
        return DTYPE_BYTES[self.dtype]

    @property
    def kv_dtype_bytes(self) -> int:
        """Bytes of an element of the KV cache."""
        return DTYPE_BYTES[self.kv_dtype]

    @property
    def fullest_stage(self) -> int:
        """The first stage with room for the fewest KV blocks: all stages have as many."""
        mix = block_mix(self.config, self.model)
        return min(range(len(self.memory)), key=lambda index: self.memory[index].max_blocks(mix))

    @property
    def start_layers(self) -> list[int]:
        """The first layer of each stage."""
        return [sum(self.layers[:index]) for index in range(len(self.layers))]

    @property
    def edge_bytes(self) -> list[int]:
        """Bytes per token from each stage to the next: hidden states, inputs of layers, and what a draft head wants.

        Each member sends as many to a stage on its node, and `slice_bytes` of them to one on another node.
        """
        taps: list[tuple[int, int]] = []
        if self.draft_head is not None:
            taps = list(zip(self.draft_head.config.aux_depths, self.draft_head.tap_stages, strict=True))
        carried = [len({depth for depth, of in taps if of <= stage}) for stage in range(len(self.layers) - 1)]
        sizes = map(self.model.stream_size, self.start_layers[1:])
        hidden_size, dtype_bytes = self.model.hidden_size, self.dtype_bytes
        return [(count * hidden_size + size) * dtype_bytes for count, size in zip(carried, sizes, strict=True)]


def lay_out(config: EngineConfig, hardware: Hardware, find_model: Callable[[str, str | None], Path]) -> EngineLayout:
    """Decide all but the number of KV blocks.

    Args:
        config: What is asked for.
        hardware: What the stages will run on.
        find_model: Returns a model's directory, given its name and revision.

    Raises:
        ConfigError: settings that cannot work together or with this model.
        ModelLoadError: no such model, or one of an architecture that raypp does not have.
        ResourceError: there is no GPU, and one is asked for.
    """
    asked, model_path = config, find_model(config.model.model, config.model.revision)
    read = load_model_config(
        model_path,
        impl=config.model.model_impl,
        trusts_code=config.model.trust_remote_code,
        rope_scaling=config.model.rope_scaling,
        max_model_len=config.model.max_model_len,
    )
    if not config.encoder.num_encoders:
        read = replace(read, vision=None)
    whole, read = read, _for_members(config, read, model_path)
    config = _for_row_states(config, read)
    described = with_even_routing(config, read)
    stored = described if config.model.load_format == "dummy" else as_stored(described, model_path)
    num_stages = config.parallel.num_stages
    device = _device(config, hardware)
    if device != "cpu" and read.num_members > 1 and config.parallel.stage_num_gpus < 1:
        raise ConfigError(
            "each member of a stage has a GPU of its own: NCCL joins no two processes on one",
            got=f"tensor_parallel_size={read.num_members}, stage_num_gpus={config.parallel.stage_num_gpus:g}",
            expected="stage_num_gpus = 1, or tensor_parallel_size = 1",
        )
    dtype = _dtype(config, stored, device)
    model = with_weight_form(config, stored, hardware, device=device, dtype=dtype)
    kv_dtype = choose_kv_dtype(config, model, hardware, device=device, dtype=dtype)
    dtype_bytes, kv_dtype_bytes = DTYPE_BYTES[dtype], DTYPE_BYTES[kv_dtype]
    num_threads = config.parallel.stage_num_threads or hardware.threads_per_stage(num_stages * read.num_members)
    if stored.measured is not None:
        _refuse_for_transformers(config, model)
    if config.model.batch_invariant:
        _check_batch_invariant(config, model, hardware, device=device, dtype=dtype)
    head, head_path = draft_head(config, model, hardware, device=device, dtype=dtype, model_path=model_path)
    held = held_model(model, hardware, device=device, dtype=dtype)
    held_head = head and replace(head, layer=held_model(head.layer, hardware, device=device, dtype=dtype))
    if head is not None and model.windows[0] is not None:
        raise ConfigError(
            "a draft head sees all tokens of a request, and this model keeps none that long",
            got=f"speculative.method={config.speculative.method}, windows of {model.windows[0]} tokens in all layers",
            expected="a model with layers that see all tokens",
            hint='speculative.method = "ngram"',
        )
    encoders = plan_encoders(
        config,
        model,
        hardware,
        model_path=str(model_path),
        device=device,
        dtype=dtype,
        dtype_bytes=dtype_bytes,
        num_threads=num_threads,
    )
    take_all = device != "cpu" and config.parallel.stage_num_gpus == 1 and not encoders.num_encoders
    gpus = gpus_of_stages(hardware, num_stages, read.num_members, take_all=take_all)
    window = ngram_window(config, model)
    head_bytes = 0 if held_head is None else draft_head_bytes(held_head, model, num_stages, dtype_bytes)

    def memory_of(config: EngineConfig, layers: Sequence[int]) -> tuple[StageMemory, ...]:
        starts = [sum(layers[:index]) for index in range(num_stages)]
        ends = list(map(add, starts, layers))
        block_bytes = [
            block_bytes_by_group(model, config.cache.block_size, kv_dtype_bytes, start, end)
            for start, end in zip(starts, ends, strict=True)
        ]
        sizes = (config.cache.block_size, config.speculative.max_drafts, dtype_bytes)
        of_rows = state_bytes_per_row(model, *sizes, has_snapshots=num_snapshots(config) > 0)
        weight_bytes = stage_weight_bytes(held, layers, dtype_bytes)
        spec = None
        if head is not None:
            spec = draft_head_spec(config, head_path, head, starts)
            weight_bytes[-1] += head_bytes
            block_bytes[-1][0] += config.cache.block_size * sum(kv_bytes_per_token(head.layer, kv_dtype_bytes))
        return memory_of_stages(
            config,
            hardware,
            model,
            device=device,
            gpus=gpus,
            dtype_bytes=dtype_bytes,
            weight_bytes=weight_bytes,
            block_bytes=block_bytes,
            row_bytes=[sum(of_rows[start:end]) for start, end in zip(starts, ends, strict=True)],
            speculation_bytes=speculation_bytes(config, model, window, spec, dtype_bytes),
            item_bytes=encoders.item_bytes,
        )

    def room_for(num_requests: float) -> LayerRoom:
        mix = block_mix(config, model)
        rows = {"max_num_seqs": max(num_stages, math.ceil(num_requests))} if model.has_row_states else {}
        least = 1 + -(-(config.model.max_model_len or 1) // config.cache.block_size)
        return layer_room(
            config.with_settings(**rows),
            held,
            without_layers,
            dtype_bytes=dtype_bytes,
            kv_dtype_bytes=kv_dtype_bytes,
            num_blocks=max(least, config.cache.num_kv_blocks or 0, 1 + math.ceil(num_requests * mix.usual_blocks)),
        )

    without_layers = memory_of(config, [0] * num_stages)
    costs = costs_of(config, held, held_head, dtype_bytes, device, gpus)
    layers = layers_per_stage(config, model, costs, room_for if gpus[0].indices else None)
    starts = [sum(layers[:index]) for index in range(num_stages)]
    head_spec = None if head is None else draft_head_spec(config, head_path, head, starts)
    if model.has_row_states and config.cache.num_kv_blocks is None:
        config = with_fitting_rows(config, model, partial(memory_of, layers=layers), on_gpu=device != "cpu")
    return EngineLayout(
        asked=asked,
        config=config,
        model_path=str(model_path),
        model=model,
        num_parameters=parameter_counts(whole),
        held_model=held,
        dtype=dtype,
        kv_dtype=kv_dtype,
        device=device,
        num_threads=num_threads,
        ngram_window=window,
        draft_head=head_spec,
        held_head=held_head,
        draft_head_bytes=head_bytes,
        encoders=encoders,
        gpus=tuple(gpus),
        layers=tuple(layers),
        memory=memory_of(config, layers),
    )


def _for_row_states(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """Return the configuration without a prefix cache if layers keep states, and no snapshot of them is to be kept.

    Raises:
        ConfigError: blocks that a prefix cache finds are to be kept in CPU memory all the same.
    """
    if not model.has_row_states or not config.cache.enable_prefix_caching:
        return config
    if config.cache.num_state_snapshots != 0:
        return config
    if config.cache.cpu_kv_bytes:
        raise ConfigError(
            "cpu_kv_bytes has no effect without snapshots of states, which come back to a place on the device",
            got=f"cpu_kv_bytes={config.cache.cpu_kv_bytes}, num_state_snapshots=0, {model.architecture}",
            expected="num_state_snapshots of at least 1, or cpu_kv_bytes = 0",
        )
    return config.with_settings(enable_prefix_caching=False)


def _for_members(config: EngineConfig, model: ModelConfig, path: Path) -> ModelConfig:
    """Return the model as one member of a stage has it.

    Raises:
        ConfigError: it cannot be cut so, or something is asked for that stages of several members do not have.
    """
    count = config.parallel.tensor_parallel_size
    if count == 1:
        return model
    if config.graphs.compile:
        raise ConfigError(
            "stages of several members do not have compiled layers yet",
            got=f"tensor_parallel_size={count}",
            expected="tensor_parallel_size = 1",
            hint="compile = false in section graphs",
        )
    return of_one_member(model, count, path=path, whole_experts=config.parallel.enable_expert_parallel)


def _refuse_for_transformers(config: EngineConfig, model: ModelConfig) -> None:
    """Refuse what is for raypp's own layers alone."""
    if config.speculative.model is not None:
        raise ConfigError(
            "a draft head reads hidden states of raypp's own layers",
            got=f"{config.speculative.model}, and a model of transformers' modules",
            hint="README lists the architectures with layers of raypp's own",
        )


_MOST_HEAD, _MOST_GROUP = 256, 64
"""Of `raypp.ops.cuda.invariant_attention`, which needs torch."""


def _check_batch_invariant(
    config: EngineConfig, model: ModelConfig, hardware: Hardware, *, device: str, dtype: str
) -> None:
    """Refuse what would give a row other bits beside other rows, or in another step.

    Raises:
        ConfigError: says what, and why.
    """
    gpus = sorted({gpu.name for machine in hardware.machines for gpu in machine.gpus})
    reasons = {
        f"GPUs of different kinds, which sum in other orders: {', '.join(gpus)}": len(gpus) > 1,
        f"stages on {device} in {dtype}, whose products are torch's": device == "cpu" or dtype == "float32",
        "transformers' modules, whose operations are torch's": model.measured is not None,
        "compile=true: a compiler fuses by the number of tokens": bool(config.graphs.compile),
        "images, which encoders compute in batches (num_encoders=0 leaves them out)": model.vision is not None,
        "recurrent states, which prompts compute in chunks": model.has_row_states,
        "latents, which prompts expand and decode steps do not": any(each.latent for each in model.attending),
        "a norm of all heads at once, which torch sums": model.has_wide_qk_norm,
        f"heads of more than {_MOST_HEAD}, or more than {_MOST_GROUP} query heads per KV head": any(
            max(each.head_dim, each.v_dim) > _MOST_HEAD or each.num_heads > _MOST_GROUP * each.num_kv_heads
            for each in model.attending
            if each.latent is None
        ),
        f"more than {MAX_REPORTED} log-probabilities, which torch sums (max_logprobs)": not (
            0 <= config.model.max_logprobs <= MAX_REPORTED
        ),
    }
    found = [reason for reason, is_so in reasons.items() if is_so]
    if found:
        raise ConfigError(
            "batch_invariant cannot hold",
            got="; ".join(found),
            expected="layers of raypp's own with attention over keys and values, in 16 bits on GPUs, text alone",
            hint="batch_invariant=false",
        )


def block_bytes_by_group(
    model: ModelConfig, block_size: int, kv_dtype_bytes: int, start_layer: int, end_layer: int
) -> list[int]:
    """Return what a KV block of each group of layers takes on a stage that has the layers [start_layer, end_layer)."""
    sizes, block_bytes = kv_bytes_per_token(model, kv_dtype_bytes), [0] * len(model.windows)
    for index in range(start_layer, end_layer):
        if (group := model.group_of(index)) is not None:
            block_bytes[group] += block_size * sizes[index]
    return block_bytes


def _device(config: EngineConfig, hardware: Hardware) -> str:
    asked = config.parallel.device
    if asked == "cuda" and not hardware.num_gpus:
        raise ResourceError(
            "there is no GPU for the stages",
            got="device=cuda, and no GPU on this machine or in the cluster",
            hint=hardware.complaint or "device=cpu computes without one",
        )
    if asked != "auto":
        return asked
    return "cuda" if hardware.num_gpus else "cpu"


def _dtype(config: EngineConfig, model: ModelConfig, device: str) -> str:
    if config.model.dtype != "auto":
        return config.model.dtype
    return "float32" if device == "cpu" else model.dtype


def with_even_routing(config: EngineConfig, model: ModelConfig) -> ModelConfig:
    """Return the model whose tokens choose experts evenly, if that is asked for.

    Raises:
        ConfigError: it is asked for, and the model has no experts.
    """
    if not config.model.even_routing:
        return model
    if model.experts is None:
        raise ConfigError(
            "model.even_routing is for models with experts",
            got=f"even_routing=true, {model.architecture}, which is dense",
            expected="a mixture of experts",
            hint="leave even_routing out",
        )
    _LOG.warning("tokens choose their experts evenly, whatever the router says: texts are nonsense")
    return replace(model, experts=replace(model.experts, are_chosen_evenly=True))


def choose_kv_dtype(config: EngineConfig, model: ModelConfig, hardware: Hardware, *, device: str, dtype: str) -> str:
    """Return the name of the KV cache's torch type.

    Args:
        config: What is asked for.
        model: Whether its checkpoint was made for a cache in 8 bits.
        hardware: What the GPUs can.
        device: `cpu` or `cuda`.
        dtype: Of the activations.

    Raises:
        ConfigError: 8 bits are asked for, and the GPUs have no such type.
    """
    asked = config.cache.kv_cache_dtype
    is_possible = device == "cpu" or dtype == "float32" or hardware.has_fp8  # plain torch needs no such GPU
    if asked == "fp8" and not is_possible:
        raise ConfigError(
            "the KV cache cannot be in 8 bits here",
            got=f"kv_cache_dtype=fp8, compute capability {'.'.join(map(str, hardware.gpu_capability))}",
            expected="GPUs of compute capability 8.9 or later (Ada, Hopper, Blackwell), stages on CPUs, or float32",
            hint="kv_cache_dtype=auto",
        )
    wants_fp8 = asked == "fp8" or (asked == "auto" and model.has_fp8_kv_cache)
    return _FP8 if wants_fp8 and is_possible else dtype


def with_weight_form(
    config: EngineConfig, model: ModelConfig, hardware: Hardware, *, device: str, dtype: str
) -> ModelConfig:
    """Return the model with its linear layers in the form that is asked for.

    Args:
        config: What is asked for.
        model: As its config.json has it.
        hardware: What the GPUs can.
        device: `cpu` or `cuda`.
        dtype: Of the activations.

    Raises:
        ConfigError: FP8 is asked for, and the checkpoint has fewer bits already, or the GPUs have no such type.
    """
    if config.model.quantization is None:
        return model
    if model.quantization is not None and model.quantization.format != "fp8":
        raise ConfigError(
            "model.quantization asks for FP8, and the checkpoint's weights are in another form",
            got=f"quantization=fp8, weights of {model.quantization.bits} bits ({model.quantization.format})",
            expected="a checkpoint in 16 bits or in FP8",
            hint="leave quantization out: the checkpoint's own form is used",
        )
    if device == "cuda" and dtype != "float32" and _lacks_fp8(hardware):
        raise ConfigError(
            "the weights cannot be in 8 bits here",
            got=f"quantization=fp8, compute capability {'.'.join(map(str, hardware.gpu_capability))}",
            expected="GPUs of compute capability 8.9 or more",
            hint="leave quantization out",
        )
    return replace(model, quantization=ONLINE_FP8) if model.quantization is None else model


def held_model(model: ModelConfig, hardware: Hardware, *, device: str, dtype: str) -> ModelConfig:
    """Return the model with its linear layers in the form in which the device holds them.

    Args:
        model: With the form of `with_weight_form`.
        hardware: What the GPUs can; of unknown ones the best is assumed.
        device: `cpu` or `cuda`.
        dtype: Of the activations.
    """
    quantization = model.quantization
    if quantization is None:
        return model
    is_multiplied = device == "cuda" and dtype != "float32" and quantization.has_gpu_product
    lacks_type = quantization.bits == 8 and _lacks_fp8(hardware)
    held = replace(quantization, is_for_gpus=True) if is_multiplied and not lacks_type else None
    return replace(model, quantization=held)


def _lacks_fp8(hardware: Hardware) -> bool:
    return not hardware.has_fp8 and hardware.gpu_capability != (0, 0)

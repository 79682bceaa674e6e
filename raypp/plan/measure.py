"""Times the parts of a model on the device at hand, in steps like those that an engine would run, and cuts its layers.

Real stages are run one after the other in this process: a first, a middle and a last one, with one layer each, and
again with a few. What more layers take more is a layer's time; what is left is what each stage does besides. Layers
that differ, dense ones and ones with experts or with other forms of weights, are measured apart. Weights are random,
and the prompts of the rows that decode are not computed: neither changes how long a step takes, but for the experts
that tokens choose, which random weights spread. A step may have a prompt besides, which is computed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from operator import add
from typing import Any, cast

import numpy as np
import torch

from raypp.config.engine_config import EngineConfig
from raypp.config.sections import SpeculativeSection
from raypp.errors import ConfigError
from raypp.members import LoneMember
from raypp.messages import BlockGroup, StepPlan, StepResult
from raypp.models.config import ModelConfig
from raypp.models.sizes import (
    layer_prefix,
    layer_sizes,
    linear_modules,
)
from raypp.plan.cost_model import StepCosts, layer_sums_ms, parts_of
from raypp.plan.engine_plan import EnginePlan
from raypp.plan.layer_partition import LayerRoom, even_partition, fastest_partition, layer_room
from raypp.plan.stage_memory import stage_weight_bytes
from raypp.request import Request
from raypp.sampling_params import SamplingParams
from raypp.scheduler.scheduler import Scheduler
from raypp.stage.build_stage import allocate_kv_caches, build_stage_model, configure_torch
from raypp.stage.schemas import StageSchemas
from raypp.stage.stage import Stage
from raypp.stage.stage_model import StageModel
from raypp.stage.stage_spec import NUM_PADDING_ROWS
from raypp.tracing import Tracer
from raypp.transport.open import open_local_links

_NUM_STAGES = 3
_FEW_LAYERS, _MORE_LAYERS = 1, 3
_WARM_UP_STEPS = 3
_MAX_STEPS, _MIN_STEPS = 40, 8
_MAX_SECONDS = 10.0  # for the steps of one measurement; at least _MIN_STEPS are made


@dataclass(frozen=True, kw_only=True)
class MeasuredCosts:
    """How long the parts of a step take, milliseconds."""

    num_rows: int  # of the step, that decode
    context_len: int  # tokens of each row
    num_steps: int  # that were timed
    layers_ms: tuple[float, ...]  # of each layer; those of one kind are measured once
    embedding_ms: float
    lm_head_ms: float  # with the final norm
    sampler_ms: float  # with the feedback to the first stage
    every_stage_ms: float  # receiving, positions, block tables, sending
    first_stage_ms: float  # the embedding, and applying feedback
    last_stage_ms: float  # LM head and sampler, less the sending
    num_prompt_tokens: int = 0  # of the step
    drafting_ms: float = 0.0  # of a draft head: estimated from its bytes and a layer's time
    sums_ms: float = 0.0  # of a layer's time, the mean: of sums over the members of a stage: estimated, on GPUs alone

    @property
    def step_text(self) -> str:
        """What the steps were made of, for people."""
        prompts = f" and {self.num_prompt_tokens} tokens of a prompt" if self.num_prompt_tokens else ""
        return f"steps of {self.num_rows} decode rows of {self.context_len} tokens{prompts}"

    @property
    def layer_text(self) -> str:
        """The times of a layer, for people: of each kind, in the order in which they come."""
        sums = f", {self.sums_ms:.2g} of these estimated for sums over members" if self.sums_ms else ""
        return " or ".join(f"{layer_ms:.4g}" for layer_ms in dict.fromkeys(self.layers_ms)) + sums

    def step_costs(self) -> StepCosts:
        """Return what cutting the layers into stages needs of it."""
        return StepCosts(
            layers=self.layers_ms,
            every_stage=self.every_stage_ms,
            first_stage=self.first_stage_ms,
            last_stage=self.last_stage_ms + self.drafting_ms,
        )


def measure_costs(
    plan: EnginePlan, *, num_rows: int, context_len: int, params: SamplingParams, num_prompt_tokens: int = 0
) -> MeasuredCosts:
    """Time the parts of the plan's model on the plan's device. Takes seconds.

    Args:
        plan: Model, data type, device, threads and block size.
        num_rows: R, the rows of a decode step.
        context_len: Tokens of each row.
        params: How rows are sampled.
        num_prompt_tokens: Of the prompt that each step computes besides; 0: it only decodes.

    Raises:
        ConfigError: layers depend on others.
    """
    if len(plan.model.stage_begins) < plan.model.num_layers:
        raise ConfigError(
            "layers that share keys and values are not measured",
            got=plan.model.architecture,
            hint="its default partition is by estimated times; `raypp info` shows it",
        )
    sizes = layer_sizes(plan.held_model, plan.dtype_bytes)
    of_layers = [(type(mixer), size) for mixer, size in zip(plan.held_model.attention, sizes, strict=True)]
    kinds = {
        kind: _measure_kind(plan, of_layers.index(kind), num_rows, context_len, params, num_prompt_tokens)
        for kind in dict.fromkeys(of_layers)
    }
    layer_ms = [kinds[kind].layers_ms[0] for kind in of_layers]
    num_tokens, on_gpu = num_rows + num_prompt_tokens, plan.stage_spec(0).device != "cpu"
    reads_per_ms = sum(size.reads.of(num_tokens) for size in sizes) / sum(layer_ms)
    sums_ms = [layer_sums_ms(plan.model, size, num_tokens) if on_gpu else 0.0 for size in sizes]
    return replace(
        kinds[of_layers[0]],
        layers_ms=tuple(map(add, layer_ms, sums_ms)),
        sums_ms=sum(sums_ms) / len(sums_ms),
        drafting_ms=plan.drafting_bytes / reads_per_ms,
    )


def _measure_kind(
    plan: EnginePlan,
    layer_index: int,
    num_rows: int,
    context_len: int,
    params: SamplingParams,
    num_prompt_tokens: int,
) -> MeasuredCosts:
    """Time the parts of a model whose layers are all like that one."""
    few, more = (
        _Rig(
            plan,
            model_of_alike_layers(plan.model, layer_index, _NUM_STAGES * num_layers),
            num_rows=num_rows,
            context_len=context_len,
            params=params,
            num_prompt_tokens=num_prompt_tokens,
        )
        for num_layers in (_FEW_LAYERS, _MORE_LAYERS)
    )
    # By turns, so that a machine whose speed changes while this runs does not change the difference.
    started_s, num_steps = time.monotonic(), 0
    while num_steps < _MAX_STEPS and (num_steps < _MIN_STEPS or time.monotonic() - started_s < _MAX_SECONDS):
        few.step()
        more.step()
        num_steps += 1
    few_ms, more_ms = few.stage_ms(), more.stage_ms()
    layer_ms, first_ms, middle_ms, last_ms = parts_of(few_ms, more_ms, _FEW_LAYERS, _MORE_LAYERS)
    embedding_ms, lm_head_ms = few.embedding_ms(), few.lm_head_ms()
    return MeasuredCosts(
        num_rows=num_rows,
        context_len=context_len,
        num_prompt_tokens=num_prompt_tokens,
        num_steps=num_steps,
        layers_ms=(layer_ms,),
        embedding_ms=embedding_ms,
        lm_head_ms=lm_head_ms,
        sampler_ms=max(last_ms - lm_head_ms, 0.0),
        every_stage_ms=middle_ms,
        first_stage_ms=first_ms,
        last_stage_ms=last_ms,
    )


def model_of_alike_layers(model: ModelConfig, layer_index: int, num_layers: int) -> ModelConfig:
    """Return a model of `num_layers` layers that are all like one of another model."""
    experts, quantization = model.experts, model.quantization
    if experts is not None:
        experts = replace(experts, dense_layers=frozenset()) if model.experts_of(layer_index) else None
    if quantization is not None:
        prefix = layer_prefix(model, layer_index)
        plain = [name for name in linear_modules(model, layer_index) if not quantization.covers(prefix + name)]
        quantization = replace(quantization, skipped=tuple(plain), only=())
    attention = (model.attention[layer_index],) * num_layers
    return replace(model, attention=attention, experts=experts, quantization=quantization)


class _Rig:
    """Three stages of a few layers each, and a scheduler that keeps `num_rows` requests decoding.

    With `num_prompt_tokens` another request begins with every step, and ends with it.
    """

    def __init__(
        self,
        plan: EnginePlan,
        model: ModelConfig,
        *,
        num_rows: int,
        context_len: int,
        params: SamplingParams,
        num_prompt_tokens: int,
    ) -> None:
        num_layers = model.num_layers // _NUM_STAGES
        most_step_tokens = max(plan.config.scheduler.max_num_batched_tokens, num_rows + num_prompt_tokens)
        # The first rows decode while prompts of the others are computed, a step of each cohort at a time.
        num_steps = _NUM_STAGES * -(-num_rows * context_len // max(1, most_step_tokens - num_rows))
        num_tokens = context_len + num_steps + _MAX_STEPS + 4 * _WARM_UP_STEPS + 8
        block_size, num_prompts = plan.config.cache.block_size, int(num_prompt_tokens > 0)
        blocks_per_row, prompt_blocks = -(-num_tokens // block_size), -(-(num_prompt_tokens + 1) // block_size)
        max_rows = num_rows + num_prompts
        common = replace(
            plan.stage_spec(0),
            device="cpu" if plan.device == "cpu" else "cuda:0",  # Ray shows a task its own GPU alone
            num_stages=_NUM_STAGES,
            load_format="dummy",
            transport="local",
            max_num_seqs=max_rows + NUM_PADDING_ROWS,
            max_step_rows=max_rows,
            max_step_tokens=most_step_tokens,
            max_model_len=max(num_tokens, num_prompt_tokens + 1),
            # The scheduler keeps a block free for each running request when it admits another one.
            groups=tuple(
                BlockGroup(1 + num_rows * blocks_per_row + num_prompts * (prompt_blocks + max_rows), window)
                for window in model.windows or (None,)
            ),
            trace=False,
            max_drafts=0,
            speculative=SpeculativeSection(),
            draft_head=None,
        )
        specs = [
            replace(
                common,
                stage_index=index,
                start_layer=index * num_layers,
                end_layer=(index + 1) * num_layers,
                layer_groups=(model.group_of(0),) * num_layers,
            )
            for index in range(_NUM_STAGES)
        ]
        configure_torch(common.num_threads, common.device)
        # What one member computes; the others would take as long, and their sums are estimated.
        members = LoneMember(plan.num_members) if plan.num_members > 1 else None
        self._models = [_PromptSkipping(build_stage_model(spec, model, None, members)) for spec in specs]
        self._device = torch.device(common.device)
        self._dtype: torch.dtype = getattr(torch, common.dtype)
        self._num_rows, self._model_config = num_rows, model
        self._num_prompt_tokens, self._num_prompts = num_prompt_tokens, 0
        self._prompt: Request | None = None
        schemas = StageSchemas.of(common, model.hidden_size)
        links = open_local_links(
            _NUM_STAGES,
            forward=schemas.forward_messages(common),
            feedback=schemas.feedback_messages(common),
            device=self._device,
        )
        silent = Tracer("measure", enabled=False)
        stages = [
            Stage(
                spec,
                cast(StageModel, of_stage),
                allocate_kv_caches(spec, model),
                ends,
                schemas,
                silent,
                members=members,
            )
            for spec, of_stage, ends in zip(specs, self._models, links, strict=True)
        ]
        self._stages = _TimedStages(stages, self._device)
        # One cohort that holds all rows: every decode step is a full one.
        limits = replace(
            plan.scheduler_limits(),
            num_stages=1,
            max_num_seqs=max_rows,
            max_num_batched_tokens=common.max_step_tokens,
            max_model_len=common.max_model_len,
            groups=common.groups,
            enable_prefix_caching=False,
        )
        self._scheduler = Scheduler(limits)
        self._start(context_len, replace(params, max_tokens=num_tokens - context_len, ignore_eos=True))

    def step(self) -> None:
        """Run one step in which all rows decode."""
        num_before = self._stages.num_timed
        while self._stages.num_timed == num_before:
            self._add_prompt()
            plan = self._scheduler.schedule()
            assert plan is not None, "the requests ended before the measurement"
            self._scheduler.update(self._stages.run(plan))

    def _add_prompt(self) -> None:
        """Have a prompt wait, if steps are to have one."""
        if not self._num_prompt_tokens or (self._prompt is not None and not self._prompt.finish_reason):
            return
        number, vocab_size = self._num_prompts, self._model_config.vocab_size
        token_ids = ((np.arange(self._num_prompt_tokens) + number) % vocab_size).astype(np.int32)
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        self._prompt = Request(f"prompt-{number}", token_ids, params, seed=number)
        self._num_prompts += 1
        self._scheduler.add(self._prompt)

    def stage_ms(self) -> list[float]:
        """Return each stage's time of a step, milliseconds."""
        return [_typical_ms(times) for times in self._stages.seconds]

    def embedding_ms(self) -> float:
        """Return the time of the embedding of a step's tokens, milliseconds."""
        num_tokens = self._num_rows + self._num_prompt_tokens
        token_ids = torch.arange(num_tokens, device=self._device, dtype=torch.int32) % self._model_config.vocab_size
        return self._time(lambda: self._models[0].embed(token_ids))

    def lm_head_ms(self) -> float:
        """Return the time of the final norm and the LM head for a step's rows, milliseconds."""
        hidden = torch.randn(self._num_rows, self._model_config.hidden_size).to(self._device, self._dtype)
        return self._time(lambda: self._models[-1].compute_logits(hidden))

    def _time(self, function: Callable[[], torch.Tensor]) -> float:
        seconds = []
        with torch.inference_mode():
            for _ in range(_WARM_UP_STEPS + _MIN_STEPS):
                started_s = time.perf_counter()
                function()
                _finish(self._device)
                seconds.append(time.perf_counter() - started_s)
        return _typical_ms(seconds[_WARM_UP_STEPS:])

    def _start(self, context_len: int, params: SamplingParams) -> None:
        """Bring all rows to decoding, without computing their prompts."""
        for number in range(self._num_rows):
            # Rows differ, so that they do not all choose the same experts.
            prompt = np.full(context_len, number % self._model_config.vocab_size, np.int32)
            self._scheduler.add(Request(f"row-{number}", prompt, params, seed=number))
        self._stages.num_decode_rows = self._num_rows
        self._stages.num_rows = self._num_rows + (self._num_prompt_tokens > 0)
        for model in self._models:
            model.skips = True
        self.step()
        for model in self._models:
            model.skips = False
        for _ in range(_WARM_UP_STEPS):
            self.step()
        self._stages.forget()


class _PromptSkipping:
    """A stage's model whose eager steps compute nothing while `skips` is set. What graphs hold is never skipped."""

    def __init__(self, model: StageModel) -> None:
        self._model = model
        self.skips = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, hidden: torch.Tensor, *inputs: Any) -> torch.Tensor:
        return hidden if self.skips else self._model.forward(hidden, *inputs)


class _TimedStages:
    """Runs the stages one after the other, and times the steps in which all rows decode."""

    def __init__(self, stages: Sequence[Stage], device: torch.device) -> None:
        self._stages = stages
        self._device = device
        self.num_decode_rows = 0  # of the steps to be timed
        self.num_rows = 0  # of them in all
        self.num_timed = 0
        self.seconds: list[list[float]] = [[] for _ in stages]

    def run(self, plan: StepPlan) -> StepResult:
        is_timed = (plan.num_decode_rows, len(plan.rows)) == (self.num_decode_rows, self.num_rows)
        with torch.inference_mode():
            for stage, seconds in zip(self._stages, self.seconds, strict=True):
                stage.announce(plan)
                _finish(self._device)
                started_s = time.perf_counter()
                pending = stage.step(plan)
                _finish(self._device)
                if is_timed:
                    seconds.append(time.perf_counter() - started_s)
        self.num_timed += is_timed
        assert pending is not None
        return pending.wait()

    def forget(self) -> None:
        """Drop the times so far."""
        for seconds in self.seconds:
            seconds.clear()


def _typical_ms(seconds: Sequence[float]) -> float:
    """Return the first quartile, milliseconds: what else the machine does only ever adds."""
    return statistics.quantiles(seconds, n=4)[0] * 1e3


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def default_context_len(plan: EnginePlan, num_rows: int) -> int:
    """Return the tokens that a row has on average when the KV cache is half full, at most half of the longest."""
    held = (plan.num_blocks - 1) * plan.config.cache.block_size // num_rows
    return max(min(held // 2, plan.max_model_len // 2), 1)


@dataclass(frozen=True, kw_only=True)
class Split:
    """One way to cut the layers, and the time that it predicts for a step of each stage."""

    layers: tuple[int, ...]
    stage_ms: tuple[float, ...]

    @property
    def slowest_ms(self) -> float:
        """The time of the slowest stage: a full pipeline finishes a step this often."""
        return max(self.stage_ms)


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What was measured, and the split that follows from it."""

    config: EngineConfig  # with the best split
    measured: MeasuredCosts
    best: Split
    even: Split
    default: Split  # what an engine takes without tuning
    max_layers: tuple[int, ...]  # that the memory of each stage holds, the smallest ones where they differ

    def gain_over(self, other: Split) -> float:
        """Return how many more steps per second a full pipeline makes than with another split: 0.1 is 10 %."""
        return other.slowest_ms / self.best.slowest_ms - 1.0

    def describe(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return {
            "model": self.config.model.model,
            "num_stages": self.config.parallel.num_stages,
            "measured": asdict(self.measured) | {"step": self.measured.step_text},
            "max_layers": list(self.max_layers),
            "splits": [
                {
                    "split": name,
                    "layers": list(split.layers),
                    "stage_ms": [round(ms, 4) for ms in split.stage_ms],
                    "slowest_ms": round(split.slowest_ms, 4),
                }
                for name, split in (("tuned", self.best), ("even", self.even), ("default", self.default))
            ],
            "gain_over_even": round(self.gain_over(self.even), 4),
            "gain_over_default": round(self.gain_over(self.default), 4),
        }

    def to_toml(self) -> str:
        """Return the configuration as TOML that `EngineConfig.from_toml` reads, with the figures as comments."""
        measured = self.measured
        comments = [
            f"Layers per stage by `raypp tune`, for {measured.step_text}.",
            f"Measured: layer {measured.layer_text} ms, embedding {measured.embedding_ms:.4g}, "
            f"LM head {measured.lm_head_ms:.4g}, sampler {measured.sampler_ms:.4g}.",
            f"Slowest stage {self.best.slowest_ms:.4g} ms; cut evenly, {list(self.even.layers)}, "
            f"{self.even.slowest_ms:.4g} ms ({self.gain_over(self.even):+.1%}).",
        ]
        return "\n".join(f"# {comment}" for comment in comments) + "\n\n" + self.config.to_toml()


def tune_partition(plan: EnginePlan, measured: MeasuredCosts) -> Tuning:
    """Return the split whose slowest stage is fastest, by the times that were measured, among those that fit.

    Raises:
        ResourceError: no split fits the stages' memory.
    """
    num_layers, num_stages = plan.model.num_layers, plan.config.parallel.num_stages
    costs = measured.step_costs()
    room = room_of(plan)

    def split(layers: list[int]) -> Split:
        return Split(layers=tuple(layers), stage_ms=tuple(costs.of_stages(layers)))

    best = fastest_partition([costs] * num_stages, room)
    return Tuning(
        config=plan.asked.with_settings(layer_partition=best),
        measured=measured,
        best=split(best),
        even=split(even_partition(num_layers, num_stages)),
        default=split([stage.num_layers for stage in plan.stages]),
        max_layers=tuple(room.most_layers()),
    )


def room_of(plan: EnginePlan) -> LayerRoom:
    """Return what layers take, with KV blocks for at least one longest request, and what each stage has for them."""
    cache = plan.config.cache
    weight_bytes = stage_weight_bytes(plan.held_model, [0] * len(plan.stages), plan.dtype_bytes)
    weight_bytes[-1] += plan.stages[-1].draft_head_bytes
    return layer_room(
        plan.config,
        plan.held_model,
        [
            replace(stage, weight_bytes=weights, row_bytes=0, block_bytes=(0,) * len(stage.block_bytes))
            for stage, weights in zip(plan.memory, weight_bytes, strict=True)
        ],
        dtype_bytes=plan.dtype_bytes,
        kv_dtype_bytes=plan.kv_dtype_bytes,
        # Blocks that were asked for are needed; else as many as the longest request takes, and the null block.
        num_blocks=cache.num_kv_blocks or 1 + -(-plan.max_model_len // cache.block_size),
    )

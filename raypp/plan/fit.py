"""Whether an engine fits its machines, and how many requests it then holds: by the plan that a start would make.

Where it does not fit, `alternatives` says what would; where it does, `layers_by_memory` and other numbers of stages say
what would hold more. All of these are planned, too.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from raypp.config.engine_config import EngineConfig
from raypp.errors import ConfigError, ResourceError
from raypp.models.attention_config import ModulesConfig
from raypp.models.config import ModelConfig
from raypp.models.registry import resolve_config_path
from raypp.models.sizes import layer_sizes, share_of_member
from raypp.plan.cost_model import slice_bytes
from raypp.plan.engine_layout import EngineLayout, lay_out
from raypp.plan.engine_plan import EnginePlan, plan_layout
from raypp.plan.hardware import GpuAsk, Hardware, Machine, busy_gpus, described_hardware, num_machines_for
from raypp.plan.layer_partition import costs_of, stage_costs
from raypp.plan.stage_memory import block_mix, check_one_machine, num_snapshots

REQUEST_LENGTHS = (2048, 8192, 32768)
"""Tokens of the requests that are counted, besides the longest that can be: prompt and output together."""
_TYPICAL_LENGTH = 8192
_MAX_STAGES = 64
_FEWER_SEQS = (128, 64, 32, 16, 8)
_FEWER_TOKENS = (1024, 512, 256)
_MOST_UTILIZATION = 0.95
_SMALL_SEQS, _SMALL_TOKENS = 16, 512
_SHARED_GPU = {"stage_num_gpus": 0.8, "encoder_num_gpus": 0.2}
_WORTH_MENTION = 1.1
"""Times the KV cache that layers per stage by memory must hold."""
_AS_FAST = 0.97
"""Of the most tokens per second: what estimates do not tell apart."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """An engine and the machines that it is planned for."""

    config: EngineConfig
    hardware: Hardware
    layout: EngineLayout
    plan: EnginePlan | None  # None: it does not fit
    problem: ResourceError | None  # what it lacks
    num_machines: int | None  # over which its stages and encoders are spread

    @property
    def machines(self) -> tuple[Machine, ...]:
        """What the stages can be placed on; empty: it is not known."""
        return self.hardware.machines

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that the KV cache holds, over all requests; 0 if the engine does not fit."""
        return 0 if self.plan is None else (self.plan.num_blocks - 1) * self.config.cache.block_size

    @property
    def num_cpu_kv_tokens(self) -> int:
        """Tokens whose KV fits into CPU memory besides."""
        return 0 if self.plan is None else self.plan.groups[0].num_cpu_blocks * self.config.cache.block_size

    def requests_held(self, num_tokens: int) -> int:
        """Return how many requests of that many tokens, prompt and output together, the KV cache holds."""
        if self.plan is None:
            return 0
        return self.plan.scheduler_limits().num_fitting(num_tokens)

    def num_requests(self, num_tokens: int) -> int:
        """Return how many requests of that many tokens run at once: `max_num_seqs` limits them, too."""
        return min(self.requests_held(num_tokens), self.max_num_seqs)

    @property
    def max_num_seqs(self) -> int:
        """Requests that run at a time: as many as asked for, or as many states as there is room for."""
        return self.layout.config.scheduler.max_num_seqs

    def tokens_per_s(self, num_requests: int) -> float:
        """Return about how many tokens so many requests get per second on GPUs while they decode; a usual length each.

        They run in as many cohorts as there are stages. The slowest stage sets the pace, unless there are too few.
        """
        layout, num_stages = self.layout, len(self.layout.layers)
        num_cohorts = min(num_requests, num_stages)
        num_rows = -(-num_requests // num_cohorts)
        num_tokens = typical_length(self) / 2
        num_seen = [
            num_rows * min(num_tokens, (layer.attention and layer.attention.window) or num_tokens)
            for layer in layout.model.attention
        ]
        costs = stage_costs(
            costs_of(
                self.config,
                layout.held_model,
                layout.held_head,
                layout.dtype_bytes,
                layout.device,
                layout.gpus,
                num_rows=num_rows,
                num_seen=num_seen,
                kv_dtype_bytes=layout.kv_dtype_bytes,
            ),
            layout.layers,
        )
        return 1000 * num_requests / max(sum(costs), num_cohorts * max(costs))

    def request_lengths(self) -> list[int]:
        """Return the lengths to count requests of, in tokens, ascending."""
        if self.plan is None:
            return []
        longest = self.plan.max_model_len
        return [*(length for length in REQUEST_LENGTHS if length < longest), longest]

    def describe(self) -> dict[str, Any]:
        """Return the answer as plain data."""
        problem, form, experts = self.problem, self.layout.held_model.quantization, self.layout.model.experts
        total, active = self.layout.num_parameters
        return {
            "fits": self.plan is not None,
            "problem": None if problem is None else {"message": problem.message, **_details(problem)},
            "model": self.config.model.model,
            "architecture": self.layout.model.architecture,
            "num_parameters": total,
            "num_active_parameters": active,
            "layers": None if self.layout.model.measured is None else describe_layers(self.layout.model),
            "has_experts": any(size.reads.experts for size in layer_sizes(self.layout.model, 1)),
            "whole_experts": experts.num_held if experts is not None and experts.num_parts > 1 else None,
            "quantization": None if form is None else form.format,
            "dtype": self.layout.dtype,
            "kv_cache_dtype": self.layout.kv_dtype,
            "device": self.layout.device,
            "complaint": self.hardware.complaint if self.config.parallel.device == "auto" else None,
            "machines": [asdict(machine) for machine in self.machines] or None,
            "counts_each_gpu": any(gpus.indices for gpus in self.layout.gpus),
            "num_machines_used": self.num_machines,
            "edge_bytes_per_token": max(self.layout.edge_bytes, default=0),
            "slice_bytes_per_token": slice_bytes(max(self.layout.edge_bytes, default=0), self.layout.model.num_members),
            "gpu_memory_utilization": self.config.cache.gpu_memory_utilization,
            "stage_num_gpus": self.config.parallel.stage_num_gpus,
            "num_members": self.layout.model.num_members,
            "encoders": self.layout.encoders.describe(),
            "num_kv_tokens": self.num_kv_tokens,
            "num_cpu_kv_tokens": self.num_cpu_kv_tokens,
            "max_model_len": None if self.plan is None else self.plan.max_model_len,
            "asked_max_model_len": self.config.model.max_model_len,
            "model_max_len": self.layout.model.max_position_embeddings,
            "max_num_seqs": self.max_num_seqs,
            "asked_max_num_seqs": self.config.scheduler.max_num_seqs,
            "num_snapshots": num_snapshots(self.layout.config) if self.layout.model.has_row_states else 0,
            "num_cpu_snapshots": 0 if self.plan is None else self.plan.num_cpu_snapshots,
            "fullest_stage": self.layout.fullest_stage,
            "requests": [
                {
                    "num_tokens": length,
                    "num_requests": self.num_requests(length),
                    "kv_cache_holds": self.requests_held(length),
                }
                for length in self.request_lengths()
            ],
            "stages": [self._stage(index) for index in range(len(self.layout.layers))],
        }

    def _stage(self, index: int) -> dict[str, Any]:
        memory, start = self.layout.memory[index], self.layout.start_layers[index]
        planned = None if self.plan is None else self.plan.stages[index]
        kv_bytes, cpu_kv_bytes = (planned.kv_cache_bytes, planned.cpu_kv_bytes) if planned else (None, 0)
        of_share = cpu_kv_bytes if self.layout.device == "cpu" else 0
        return {
            "stage_index": index,
            "layers": [start, start + self.layout.layers[index]],
            **asdict(memory),
            "block_bytes": sum(memory.block_bytes),
            "state_bytes": memory.state_bytes,
            "kv_cache_bytes": kv_bytes,
            "cpu_kv_bytes": cpu_kv_bytes,
            "left_bytes": memory.share_bytes - memory.taken_bytes - (kv_bytes or 0) - of_share,
        }


def check_fit(
    config: EngineConfig,
    hardware: Hardware,
    find_model: Callable[[str, str | None], Path] = resolve_config_path,
) -> Fit:
    """Plan an engine, and say what it lacks if it does not fit.

    Args:
        config: Of the engine.
        hardware: What its stages will run on; without `machines` there are as many GPUs as are asked for.
        find_model: Returns a directory with a model's config.json, given its name and revision.

    Raises:
        ConfigError, ModelLoadError: it could run on no machine.
        ResourceError: it is to compute on GPUs, and there are none.
    """
    layout = lay_out(config, hardware, find_model)
    plan, problem, num_machines = None, None, None
    try:
        if layout.device == "cuda" and hardware.machines:
            num_machines = _placed(layout, hardware.machines)
        plan = plan_layout(layout, hardware)
        if layout.device == "cpu" and hardware.machines:  # else there may be others in the cluster
            kv_bytes = [stage.kv_cache_bytes + stage.cpu_kv_bytes for stage in plan.stages]
            check_one_machine(layout.memory * plan.num_members, kv_bytes * plan.num_members)
    except ResourceError as error:
        plan, problem = None, error
    return Fit(
        config=config,
        hardware=hardware,
        layout=layout,
        plan=plan,
        problem=problem,
        num_machines=num_machines,
    )


def typical_length(fit: Fit) -> int:
    """Return the tokens of the requests that one figure is about: 8,192, or the longest where that is less."""
    asked = min(fit.config.model.max_model_len or _TYPICAL_LENGTH, fit.layout.model.max_position_embeddings)
    longest = asked if fit.plan is None else fit.plan.max_model_len
    return min(_TYPICAL_LENGTH, longest)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, which takes an s but after 1."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _details(error: ResourceError) -> dict[str, Any]:
    return {name: str(value) for name in ("got", "expected", "hint") if (value := getattr(error, name)) is not None}


def gpu_asks(layout: EngineLayout, num_stages: int) -> list[GpuAsk]:
    """Return what each of so many stages, and each encoder, asks for."""
    of_stage = GpuAsk(layout.config.parallel.stage_num_gpus, layout.model.num_members)
    of_encoder = GpuAsk(layout.config.encoder.encoder_num_gpus)
    return [of_stage] * num_stages + [of_encoder] * layout.encoders.num_encoders


def _num_asked(layout: EngineLayout) -> float:
    """Return how many GPUs all stages and encoders ask for together."""
    return sum(ask.share * ask.num_gpus for ask in gpu_asks(layout, len(layout.layers)))


def _placed(layout: EngineLayout, machines: Sequence[Machine]) -> int:
    """Return over how many machines stages and encoders are spread.

    Raises:
        ResourceError: they find no room.
    """
    num_stages, strategy = len(layout.layers), layout.config.parallel.placement
    num_machines = num_machines_for(gpu_asks(layout, num_stages), machines, strategy)
    if num_machines is None:
        num_gpus = sum(machine.num_gpus for machine in machines)
        encoders = f" and {counted(layout.encoders.num_encoders, 'encoder')}" if layout.encoders.num_encoders else ""
        num_members = layout.model.num_members
        members = f" of {num_members} members, each stage on one machine" if num_members > 1 else ""
        raise ResourceError(
            "there are too few GPUs",
            got=f"{counted(num_gpus, 'GPU')} on {counted(len(machines), 'machine')}, placement={strategy}",
            expected=f"room for {counted(num_stages, 'stage')}{members}{encoders}, which ask for "
            f"{_num_asked(layout):g} GPUs",
            hint="num_encoders = 0 if all prompts are text" if encoders else None,
        )
    return num_machines


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Other settings with which an engine fits."""

    settings: Mapping[str, object]
    num_missing_gpus: int  # that it needs besides those that there are
    fit: Fit

    def describe(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "settings": dict(self.settings),
            "num_missing_gpus": self.num_missing_gpus,
            "num_stages": len(self.fit.layout.layers),
            **summary_of(self.fit),
        }


def alternatives(fit: Fit) -> list[Alternative]:
    """Return what would fit in place of an engine that does not; each differs in as little as can be."""
    found = list(_other_stages(fit))
    if (by_memory := layers_by_memory(fit)) is not None:
        found.append(by_memory)
    single = [alternative for changes in _smaller(fit) if (alternative := _first(fit, changes))]
    if not single and not found and (small := _first(fit, [_small(fit.config)])) is not None:
        single = [small]
    return found + single


def possible_cuts(fit: Fit) -> list[Fit]:
    """Return the same engine with the numbers of stages and of members that its GPUs have room for.

    Powers of 2, and the most stages; the engine's own numbers are among them if there is room for these.
    """
    if not fit.machines or fit.layout.device != "cuda":
        return []
    parallel, found = fit.config.parallel, list[Fit | None]()
    largest = max(machine.num_gpus for machine in fit.machines)
    for num_members in sorted({*_powers_of_2(largest), parallel.tensor_parallel_size}):
        is_own = num_members == parallel.tensor_parallel_size
        with_members = fit if is_own else _changed(fit, _cut_settings(fit, parallel.num_stages, num_members))
        most = 0 if with_members is None else _most_stages(with_members)
        own = parallel.num_stages if is_own else 0
        for count in sorted({*_powers_of_2(most), most, own}):
            if 0 < count <= most:
                found.append(fit if count == own else _changed(fit, _cut_settings(fit, count, num_members)))
    return [cut for cut in found if cut is not None]


def advised_cut(cuts: Sequence[Fit]) -> Fit | None:
    """Return the cut that gives most tokens per second to the requests that run at once; None if none fits.

    Of those that give about as many, the one with the fewest GPUs, then the one that is fastest for a single request.
    Several members only where NVLink joins the GPUs: the sums' times are those.
    """
    fitting = {
        index: cut.tokens_per_s(_at_once(cut))
        for index, cut in enumerate(cuts)
        if _at_once(cut) and (cut.layout.model.num_members == 1 or all(each.has_nvlink for each in cut.machines))
    }
    most = max(fitting.values(), default=0.0)
    alike = [cuts[index] for index, speed in fitting.items() if speed >= _AS_FAST * most]
    return min(alike, key=lambda cut: (_num_asked(cut.layout), -cut.tokens_per_s(1)), default=None)


CUT = ("num_stages", "tensor_parallel_size")
"""The settings that advice is about."""


def names_cut(config: EngineConfig) -> bool:
    """Return whether a configuration says anything of stages, members or layers."""
    return bool(config.parallel.model_fields_set & {*CUT, "layer_partition"})


def advised_config(config: EngineConfig) -> EngineConfig:
    """Return a configuration with the stages and members that are advised for this machine, where it says of neither.

    One for CPUs, for a cluster that is named, where others use a GPU, or that fits with no numbers, stays.

    Raises:
        ConfigError, ModelLoadError, ResourceError: as `describe_fit`.
    """
    hardware = _of_this_machine()
    if (
        names_cut(config)
        or not hardware.machines
        or hardware.num_gpus < 2
        or config.parallel.device == "cpu"
        or busy_gpus()
    ):
        return config
    cuts = possible_cuts(check_fit(config, hardware))
    advised = advised_cut(cuts)
    return config if advised is None else advised.config


def _at_once(fit: Fit) -> int:
    return fit.num_requests(typical_length(fit))


def _powers_of_2(most: int) -> set[int]:
    """Return 1, 2, 4, ... up to a number."""
    return {1 << power for power in range(most.bit_length())}


def layers_by_memory(fit: Fit) -> Alternative | None:
    """Return the layers per stage with which the KV cache is largest, if that is worth it; else None.

    By default layers are cut so that the slowest stage is fastest. Where memory is short, that leaves some of it over.
    """
    if fit.layout.device != "cuda" or (fit.machines and fit.num_machines is None):
        return None
    best, layers, mix = fit, list(fit.layout.layers), block_mix(fit.config, fit.layout.model)
    while len(layers) > 1:
        rooms = [stage.max_blocks(mix) for stage in best.layout.memory]
        fullest = rooms.index(min(rooms))
        layers[fullest] -= 1
        layers[rooms.index(max(rooms))] += 1
        moved = _changed(fit, {"layer_partition": layers}) if layers[fullest] else None
        if moved is None or min(stage.max_blocks(mix) for stage in moved.layout.memory) <= min(rooms):
            break
        best = moved
    if best.plan is None or best.num_kv_tokens < _WORTH_MENTION * fit.num_kv_tokens:
        return None
    return Alternative(settings={"layer_partition": list(best.layout.layers)}, num_missing_gpus=0, fit=best)


def _changed(fit: Fit, settings: Mapping[str, object], hardware: Hardware | None = None) -> Fit | None:
    """Return the engine with other settings, or on other hardware; None if these cannot be."""
    try:
        return check_fit(
            fit.config.with_settings(**settings),
            hardware or fit.hardware,
            lambda name, revision: Path(fit.layout.model_path),
        )
    except ConfigError:
        return None


def _cut_settings(fit: Fit, num_stages: int, num_members: int) -> dict[str, object]:
    parallel = fit.config.parallel
    settings: dict[str, object] = {"num_stages": num_stages}
    if num_members != parallel.tensor_parallel_size:
        settings["tensor_parallel_size"] = num_members
    if parallel.layer_partition is not None:
        settings["layer_partition"] = None
    if num_stages > 1 and parallel.transport == "local":
        settings["transport"] = "auto"
    return settings


def _stage_settings(fit: Fit, num_stages: int) -> dict[str, object]:
    return _cut_settings(fit, num_stages, fit.config.parallel.tensor_parallel_size)


def _most_stages(fit: Fit) -> int:
    """Return the most stages that GPUs and layers allow; 0 if that is not known."""
    if not fit.machines or fit.layout.device != "cuda":
        return 0
    strategy, most = fit.config.parallel.placement, 0
    while most < min(_MAX_STAGES, fit.layout.model.num_layers):
        if num_machines_for(gpu_asks(fit.layout, most + 1), fit.machines, strategy) is None:
            break
        most += 1
    return most


def _other_stages(fit: Fit) -> Iterator[Alternative]:
    """Yield the next larger number of stages that fits, with more GPUs if need be; or the largest one below."""
    if fit.layout.device != "cuda":
        return
    num_stages, most = fit.config.parallel.num_stages, _most_stages(fit)
    for count in range(num_stages + 1, most + 1) if num_stages <= most else range(most, 0, -1):
        other = _changed(fit, _stage_settings(fit, count))
        if other is not None and other.plan is not None:
            yield Alternative(settings=_stage_settings(fit, count), num_missing_gpus=0, fit=other)
            return
    num_gpus = sum(machine.num_gpus for machine in fit.machines)
    first = num_stages if num_stages > most else most + 1
    for count in range(first, min(_MAX_STAGES, fit.layout.model.num_layers) + 1):
        larger = _changed(fit, _stage_settings(fit, count), replace(fit.hardware, machines=()))
        if larger is not None and larger.plan is not None:
            missing = max(1, math.ceil(_num_asked(larger.layout)) - num_gpus) if num_gpus else 0
            yield Alternative(settings=_stage_settings(fit, count), num_missing_gpus=missing, fit=larger)
            return


def _smaller(fit: Fit) -> Iterator[list[dict[str, object]]]:
    """Yield, setting by setting, the changes that ask for less, the smallest change first."""
    scheduler, cache, parallel = fit.config.scheduler, fit.config.cache, fit.config.parallel
    if fit.config.model.max_model_len is not None:
        yield [{"max_model_len": None}]
    if cache.num_kv_blocks is not None:
        yield [{"num_kv_blocks": None}]
    if parallel.layer_partition is not None:
        yield [{"layer_partition": None}]
    if fit.layout.device == "cpu":
        yield [{"kv_cache_bytes": cache.kv_cache_bytes << power} for power in range(1, 11)]
        yield [{"kv_cache_bytes": cache.kv_cache_bytes >> power} for power in range(1, 11)]
        if cache.cpu_kv_bytes:
            yield [{"cpu_kv_bytes": 0}]
        return
    yield [{"max_num_seqs": number} for number in _FEWER_SEQS if number < scheduler.max_num_seqs]
    rows = -(-scheduler.max_num_seqs // parallel.num_stages)
    tokens = [number for number in _FEWER_TOKENS if rows <= number < scheduler.max_num_batched_tokens]
    yield [{"max_num_batched_tokens": number} for number in tokens]
    if parallel.stage_num_gpus < 1:
        yield [{"stage_num_gpus": 1.0}]
    if fit.layout.encoders.num_encoders:
        yield [dict(_SHARED_GPU)]
    if cache.gpu_memory_utilization < _MOST_UTILIZATION:
        yield [{"gpu_memory_utilization": _MOST_UTILIZATION}]


def _small(config: EngineConfig) -> dict[str, object]:
    """Return all that asks for less at once."""
    scheduler, cache = config.scheduler, config.cache
    small: dict[str, object] = {
        "max_num_seqs": min(scheduler.max_num_seqs, _SMALL_SEQS),
        "max_num_batched_tokens": min(scheduler.max_num_batched_tokens, _SMALL_TOKENS),
        "gpu_memory_utilization": max(cache.gpu_memory_utilization, _MOST_UTILIZATION),
    }
    return small if config.model.max_model_len is None else {**small, "max_model_len": None}


def _first(fit: Fit, changes: Sequence[Mapping[str, object]]) -> Alternative | None:
    """Return the first of several changes with which the engine fits; None if it does with none of them."""
    for settings in changes:
        other = _changed(fit, settings)
        if other is None or other.plan is None:
            continue
        if "max_model_len" in settings:  # say how long, rather than "as long as can be"
            settings = {**settings, "max_model_len": other.plan.max_model_len}
        return Alternative(settings=settings, num_missing_gpus=0, fit=other)
    return None


def summary_of(fit: Fit) -> dict[str, Any]:
    """Return how much an engine holds, as plain data."""
    length = typical_length(fit)
    return {
        "num_kv_tokens": fit.num_kv_tokens,
        "max_model_len": None if fit.plan is None else fit.plan.max_model_len,
        "num_tokens": length,
        "num_requests": fit.num_requests(length),
    }


def describe_layers(model: ModelConfig) -> str:
    """Return how many layers of transformers' modules a model has, and what is special about their attention."""
    parts = [f"{model.num_layers} layers by transformers' modules"]
    if model.num_members > 1:
        parts.append(f"of whose weights each member has {share_of_member(model):.0%}")
    windows = Counter(attention.window for attention in model.attending if attention.window is not None)
    parts += [f"{count} with a window of {window} tokens" for window, count in windows.items()]
    num_sharing = sum(attention.source is not None for attention in model.attending)
    parts += [f"{num_sharing} with the keys and values of other layers"] if num_sharing else []
    num_states = sum(isinstance(each, ModulesConfig) and any(each.modules) for each in model.attention)
    parts += [f"{num_states} with a state per request"] if num_states else []
    for what, has in (
        ("sinks", any(attention.has_sinks for attention in model.attending)),
        ("capped scores", any(attention.soft_cap is not None for attention in model.attending)),
        ("keys and values of different sizes", any(each.head_dim != each.v_dim for each in model.attending)),
    ):
        if has:
            parts.append(what)
    return ", ".join(parts)


def describe_fit(config: EngineConfig, machines: tuple[Machine, ...] | None = None) -> dict[str, Any]:
    """Return whether an engine fits, its configuration and plan, and the hardware. Starts nothing.

    Args:
        config: Of the engine.
        machines: Described ones; None: this machine.

    Raises:
        ConfigError, ModelLoadError, ResourceError: it could run on no machine, or needs GPUs where there are none.
    """
    is_described = machines is not None
    if machines is None:
        hardware = _of_this_machine()
    else:
        if config.parallel.device == "cpu":
            raise ConfigError("--gpus describes GPUs, and device=cpu uses none", got="both", expected="one of them")
        hardware = described_hardware(machines)
    fit = check_fit(config, hardware)
    by_memory = layers_by_memory(fit) if fit.plan else None
    cuts = possible_cuts(fit)
    advised = advised_cut(cuts)
    resolved = config if fit.plan is None else fit.plan.resolved_config()
    return {
        "config": resolved.model_dump(mode="json"),
        "plan": None if fit.plan is None else fit.plan.describe(),
        "hardware": {name: value for name, value in asdict(hardware).items() if name != "machines"},
        "fit": fit.describe()
        | {
            "is_described": is_described,
            "alternatives": [] if fit.plan else [each.describe() for each in alternatives(fit)],
            "layers_by_memory": None if by_memory is None else by_memory.describe(),
            "cuts": [{"is_planned": cut is fit, "is_advised": cut is advised, **_described_cut(cut)} for cut in cuts],
        },
    }


def _described_cut(cut: Fit) -> dict[str, Any]:
    """Return the numbers of stages and members, and what they hold and how fast they are, as plain data."""
    return {
        "num_stages": len(cut.layout.layers),
        "tensor_parallel_size": cut.layout.model.num_members,
        "fits": cut.plan is not None,
        "tokens_per_s_of_one": round(cut.tokens_per_s(1)),
        "tokens_per_s": round(cut.tokens_per_s(num_requests)) if (num_requests := _at_once(cut)) else 0,
        **summary_of(cut),
    }


def _of_this_machine() -> Hardware:
    """Return what this machine has; without its machine's GPUs one by one where a cluster may have others."""
    hardware = Hardware.of_this_machine()
    return replace(hardware, machines=()) if os.environ.get("RAY_ADDRESS") else hardware

"""What would fit where an engine does not, and what would hold more where it does: all of it is planned, too."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raypp.config.engine_config import EngineConfig
from raypp.errors import ConfigError
from raypp.plan.fit import Fit, check_fit, gpu_shares, typical_length
from raypp.plan.machines import Machine, num_machines_for

_MAX_STAGES = 64
_FEWER_SEQS = (128, 64, 32, 16, 8)
_FEWER_TOKENS = (1024, 512, 256)
_MOST_UTILIZATION = 0.95
_SMALL_SEQS, _SMALL_TOKENS = 16, 512
_SHARED_GPU = {"stage_num_gpus": 0.8, "encoder_num_gpus": 0.2}
_WORTH_MENTION = 1.1
"""Times the KV cache that layers per stage by memory must hold."""


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


def other_numbers_of_stages(fit: Fit) -> list[Fit]:
    """Return the same engine with other numbers of stages that its GPUs have room for: powers of 2, and the most."""
    most = _most_stages(fit)
    counts = sorted({1 << power for power in range(most.bit_length())} | {most} - {0})
    return [_with_stages(fit, count) for count in counts if count != fit.config.parallel.num_stages]


def layers_by_memory(fit: Fit) -> Alternative | None:
    """Return the layers per stage with which the KV cache is largest, if that is worth it; else None.

    By default layers are cut so that the slowest stage is fastest. Where memory is short, that leaves some of it over.
    """
    if fit.layout.device != "cuda" or (fit.machines is not None and fit.num_machines is None):
        return None
    best, layers = fit, list(fit.layout.layers)
    while len(layers) > 1:
        rooms = [stage.max_blocks for stage in best.layout.memory]
        fullest = rooms.index(min(rooms))
        layers[fullest] -= 1
        layers[rooms.index(max(rooms))] += 1
        moved = _changed(fit, {"layer_partition": layers}, fit.machines) if layers[fullest] else None
        if moved is None or min(stage.max_blocks for stage in moved.layout.memory) <= min(rooms):
            break
        best = moved
    if best.plan is None or best.num_kv_tokens < _WORTH_MENTION * fit.num_kv_tokens:
        return None
    return Alternative(settings={"layer_partition": list(best.layout.layers)}, num_missing_gpus=0, fit=best)


def _changed(fit: Fit, settings: Mapping[str, object], machines: tuple[Machine, ...] | None) -> Fit | None:
    """Return the engine with other settings; None if these cannot be."""
    try:
        return check_fit(
            fit.config.with_settings(**settings), fit.hardware, machines, lambda name, revision: fit.layout.model_path
        )
    except ConfigError:
        return None


def _stage_settings(fit: Fit, num_stages: int) -> dict[str, object]:
    settings: dict[str, object] = {"num_stages": num_stages}
    if fit.config.parallel.layer_partition is not None:
        settings["layer_partition"] = None
    if num_stages > 1 and fit.config.parallel.transport == "local":
        settings["transport"] = "auto"
    return settings


def _with_stages(fit: Fit, num_stages: int) -> Fit:
    changed = _changed(fit, _stage_settings(fit, num_stages), fit.machines)
    assert changed is not None, "a number of stages is refused that layers and GPUs allow"
    return changed


def _most_stages(fit: Fit) -> int:
    """Return the most stages that GPUs and layers allow; 0 if nobody knows."""
    if fit.machines is None or fit.layout.device != "cuda":
        return 0
    shares = gpu_shares(fit.layout)[len(fit.layout.layers) :]
    share, strategy = fit.config.parallel.stage_num_gpus, fit.config.parallel.placement
    most = 0
    while most < min(_MAX_STAGES, fit.layout.model.num_layers):
        if num_machines_for([share] * (most + 1) + shares, fit.machines, strategy) is None:
            break
        most += 1
    return most


def _other_stages(fit: Fit) -> Iterator[Alternative]:
    """Yield the next larger number of stages that fits, with more GPUs if need be; or the largest one below."""
    if fit.layout.device != "cuda":
        return
    num_stages, most = fit.config.parallel.num_stages, _most_stages(fit)
    for count in range(num_stages + 1, most + 1) if num_stages <= most else range(most, 0, -1):
        other = _with_stages(fit, count)
        if other.plan is not None:
            yield Alternative(settings=_stage_settings(fit, count), num_missing_gpus=0, fit=other)
            return
    num_gpus = 0 if fit.machines is None else sum(machine.num_gpus for machine in fit.machines)
    first = num_stages if num_stages > most else most + 1
    for count in range(first, min(_MAX_STAGES, fit.layout.model.num_layers) + 1):
        larger = _changed(fit, _stage_settings(fit, count), None)
        if larger is not None and larger.plan is not None:
            missing = math.ceil(sum(gpu_shares(larger.layout))) - num_gpus if num_gpus else 0
            yield Alternative(settings=_stage_settings(fit, count), num_missing_gpus=max(missing, 0), fit=larger)
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
        other = _changed(fit, settings, fit.machines)
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

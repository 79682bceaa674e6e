"""A timeline from what the driver remembers of its stages' work."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from raypp.api.frontend import Frontend
from raypp.api.memory_speed import gpu_memory_speed, measure_cpu_memory_speed
from raypp.api.timeline import Forward, MemorySpeed, Timeline
from raypp.errors import ConfigError
from raypp.models.sizes import WeightReads
from raypp.plan.hardware import Hardware

_REPORTS_TIMEOUT_S = 2.0
_REPORTS_POLL_S = 0.02


async def read_timeline(
    frontend: Frontend, plan: Mapping[str, Any], *, last_s: float | None, timeout_s: float
) -> Timeline:
    """Return the last burst of work; see `Timeline.of_last_burst`.

    Args:
        frontend: Of the engine.
        plan: The engine's, as `LLM.plan` returns it.
        last_s: Keep at most this many seconds of it.
        timeout_s: For the driver to answer.

    Raises:
        ConfigError: the engine has not worked since it was started, or is being started again.
        DeadlineError: no answer in time.
        EngineDeadError: the engine died.
    """
    await _wait_for_reports(frontend, timeout_s)
    stats = await _engine_stats(frontend, timeout_s, spans_after_us=0)
    step_reads = [
        WeightReads(stage["step_weight_bytes"], stage.get("expert_bytes", 0), stage.get("chosen_expert_share", 1.0))
        for stage in plan["stages"]
    ]
    return Timeline.of_last_burst(
        [Forward.of_span(span) for span in stats["spans"]],
        step_reads=step_reads,
        memory_speed=await asyncio.to_thread(
            _memory_speed, str(plan["device"]), max(reads.total for reads in step_reads)
        ),
        last_s=last_s,
    )


async def _wait_for_reports(frontend: Frontend, timeout_s: float) -> None:
    """Wait until the stages have reported all steps there are: they do so now and then, not after each."""
    loop = asyncio.get_running_loop()
    ends = loop.time() + _REPORTS_TIMEOUT_S
    wanted = (await _engine_stats(frontend, timeout_s))["num_steps"]
    while loop.time() < ends:
        stages = (await _engine_stats(frontend, timeout_s))["stages"]
        if all(stage["num_steps"] >= wanted for stage in stages):
            return
        await asyncio.sleep(_REPORTS_POLL_S)


async def _engine_stats(frontend: Frontend, timeout_s: float, spans_after_us: int | None = None) -> dict[str, Any]:
    stats = await frontend.stats(timeout_s, spans_after_us)
    if stats["is_recovering"]:
        raise ConfigError(
            "there is no timeline while the engine is started again",
            expected="an engine that has worked since its start",
            hint="ask again when requests have run",
        )
    return stats


def _memory_speed(device: str, num_bytes: int) -> MemorySpeed | None:
    if device == "cpu":
        return measure_cpu_memory_speed(num_bytes)
    return gpu_memory_speed(Hardware.of_this_machine().gpu_name)

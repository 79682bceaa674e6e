"""What the stages did lately: when each computed, how much of the time was bubble, how near the memory's speed it was.

timeline = llm.timeline()      # of the last burst of work
timeline                       # in a notebook: an image
timeline.bubble_fraction       # 0.12
"""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from raypp.api.frontend import Frontend
from raypp.errors import ConfigError, install
from raypp.messages import StepForm
from raypp.models.sizes import WeightReads
from raypp.plan.hardware import Gpu, Hardware
from raypp.scheduler.step_budget import StepWork

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_PAUSE_US = 50_000
"""All stages idle for this long: nothing was asked of the engine, and a new burst begins."""

_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")
"""Paul Tol's bright scheme: told apart by colour-blind readers, too."""

_WIDTH_INCHES = 10.0
_LANE_INCHES = 0.45
_DPI = 110


class Forward(NamedTuple):
    """One stage's work on one step. Times are microseconds since the epoch."""

    stage_index: int
    step_id: int
    start_us: int
    end_us: int
    cohort: int
    num_rows: int
    num_tokens: int
    form: int = StepForm.EAGER
    work: StepWork = StepWork()
    predicted_us: int = 0
    """How long it was expected to take; 0 where that was not predicted."""

    @classmethod
    def of_span(cls, span: Sequence[Any]) -> Self:
        """Return one from the fields as plain data: of `AsyncLLM.stats`, or of a file, where the last ones may lack."""
        fields = dict(zip(cls._fields, span, strict=False))
        return cls(**fields | {"work": StepWork(*fields.get("work", ()))})


@dataclass(frozen=True)
class MemorySpeed:
    """How fast weights can be read."""

    bytes_per_s: float
    source: str
    """Where the figure is from: measured, or a data sheet."""


@dataclass(frozen=True)
class Timeline:
    """Forwards of all stages over a stretch of time."""

    forwards: Sequence[Forward]
    num_stages: int
    step_reads: Sequence[WeightReads]
    """Weights that a forward reads, per stage."""
    memory_speed: MemorySpeed | None = None
    """Of each stage's device; None where it is not known."""

    @classmethod
    def of_last_burst(
        cls,
        forwards: Sequence[Forward],
        *,
        step_reads: Sequence[WeightReads],
        memory_speed: MemorySpeed | None,
        last_s: float | None = None,
    ) -> Self:
        """Return the forwards since the last time that all stages were idle.

        Args:
            forwards: In any order.
            step_reads: Weights that a forward reads, per stage.
            memory_speed: Of each stage's device.
            last_s: Keep at most this many seconds of it, the last ones.

        Raises:
            ConfigError: there are none.
        """
        if not forwards:
            raise ConfigError(
                "there is nothing to draw", got="no step was executed yet", hint="generate something first"
            )
        latest_first = sorted(forwards, key=lambda forward: forward.end_us, reverse=True)
        opens_us = latest_first[0].end_us - (round(last_s * 1e6) if last_s is not None else latest_first[0].end_us)
        kept: list[Forward] = []
        earliest_us = latest_first[0].start_us
        for forward in latest_first:
            if forward.end_us < max(earliest_us - _PAUSE_US, opens_us):
                break
            earliest_us = min(earliest_us, forward.start_us)
            kept.append(forward)
        kept.reverse()
        return cls(kept, len(step_reads), step_reads, memory_speed)

    @property
    def num_steps(self) -> int:
        """Steps of which at least one stage's forward is here."""
        return len({forward.step_id for forward in self.forwards})

    @property
    def window_us(self) -> tuple[int, int]:
        """From when every stage has begun to when the first stage has no more: fill and drain excluded.

        Raises:
            ConfigError: the pipe was never full.
        """
        by_stage = [[f for f in self.forwards if f.stage_index == index] for index in range(self.num_stages)]
        if all(by_stage):
            opens = max(min(f.start_us for f in of_stage) for of_stage in by_stage)
            closes = min(max(f.end_us for f in of_stage) for of_stage in by_stage)
            if closes > opens:
                return opens, closes
        raise ConfigError("the timeline has no moment in which every stage had work", hint="generate more tokens")

    @property
    def bubble_fraction(self) -> float:
        """The share of the stages' time, 0..1, in which they ran no model, fill and drain excluded."""
        opens, closes = self.window_us
        busy = sum(max(0, min(f.end_us, closes) - max(f.start_us, opens)) for f in self.forwards)
        return 1.0 - busy / ((closes - opens) * self.num_stages)

    @property
    def share_of_limit(self) -> float | None:
        """The part of the stages' time that reading their weights alone would take at the memory's speed, 0..1.

        1 is the physical limit of decoding; KV and activations come on top and are not counted, and prefill is bound by
        arithmetic instead. None where the memory's speed is not known.
        """
        if self.memory_speed is None:
            return None
        opens, closes = self.window_us
        read_bytes = sum(
            self.step_reads[f.stage_index].of(f.num_tokens)
            * max(0, min(f.end_us, closes) - max(f.start_us, opens))
            / max(1, f.end_us - f.start_us)
            for f in self.forwards
        )
        return read_bytes / self.memory_speed.bytes_per_s / ((closes - opens) / 1e6 * self.num_stages)

    def __str__(self) -> str:
        """Return the figures in a line."""
        try:
            opens, closes = self.window_us
        except ConfigError:
            return f"{self.num_steps} steps on {self.num_stages} stages; too few to say how full the pipe was"
        text = (
            f"{self.num_steps} steps on {self.num_stages} stages, {(closes - opens) / 1e3:.1f} ms: "
            f"bubble fraction {self.bubble_fraction:.2f}"
        )
        if self.memory_speed is None:
            return text
        return (
            f"{text}, {self.share_of_limit:.1%} of the physical limit "
            f"(reading the weights at {self.memory_speed.bytes_per_s / 1e9:.0f} GB/s, {self.memory_speed.source})"
        )

    def plot(self, axes: Axes | None = None) -> Axes:
        """Draw one lane per stage, a bar per forward, a colour per cohort.

        Raises:
            ConfigError: matplotlib is not installed.
        """
        if axes is None:
            axes = _new_axes(self.num_stages)
        start_us = min(forward.start_us for forward in self.forwards)
        for cohort in sorted({forward.cohort for forward in self.forwards}):
            for has_prefill in (False, True):
                bars = [f for f in self.forwards if f.cohort == cohort and (f.num_tokens > f.num_rows) == has_prefill]
                axes.barh(
                    [f.stage_index for f in bars],
                    [(f.end_us - f.start_us) / 1e3 for f in bars],
                    left=[(f.start_us - start_us) / 1e3 for f in bars],
                    height=0.8,
                    color=_COLOURS[cohort % len(_COLOURS)],
                    hatch="///" if has_prefill else None,
                    edgecolor="white",
                    linewidth=0.3,
                    label=_label(cohort, has_prefill=has_prefill) if bars else None,
                )
        axes.set_yticks(range(self.num_stages), [f"stage {index}" for index in range(self.num_stages)])
        axes.invert_yaxis()
        axes.set_xlabel("ms")
        axes.set_title(str(self).replace(" (", "\n(", 1), fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
        return axes

    def save(self, path: str | Path) -> None:
        """Write the image; the suffix says in which format."""
        figure: Any = self.plot().figure
        figure.savefig(path, bbox_inches="tight")

    def _repr_png_(self) -> bytes | None:
        try:
            figure: Any = self.plot().figure
        except ConfigError:  # without matplotlib a notebook shows the figures alone
            return None
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=_DPI, bbox_inches="tight")
        return file.getvalue()

    def __repr__(self) -> str:
        return f"<Timeline: {self}>"


def _label(cohort: int, *, has_prefill: bool) -> str:
    name = "prefill only" if cohort < 0 else f"cohort {cohort}"
    return f"{name}, with prefill" if has_prefill and cohort >= 0 else name


def _new_axes(num_stages: int) -> Axes:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("an image needs matplotlib", hint=install("notebook")) from error
    # Not pyplot: that keeps every figure, and in a notebook shows it a second time.
    figure = Figure(figsize=(_WIDTH_INCHES, 0.9 + _LANE_INCHES * num_stages))
    axes: Axes = figure.add_subplot()
    return axes


_MAX_BUFFER_BYTES = 256 << 20
_NUM_TRIALS = 5


def gpu_memory_speed(name: str) -> MemorySpeed | None:
    """Return the data sheet's figure for a GPU, None for one that is not listed."""
    speed = Gpu(0, name).speed
    return None if speed is None else MemorySpeed(speed.bytes_per_s, f"the data sheet of {speed.name}")


def measure_cpu_memory_speed(num_bytes: int) -> MemorySpeed:
    """Measure how fast one thread reads as many bytes as a stage's weights have; small ones stay in the cache.

    Args:
        num_bytes: Of a stage's weights. More than 256 MiB says nothing new.
    """
    buffer = np.ones(max(1, min(num_bytes, _MAX_BUFFER_BYTES) // 8), np.int64)
    best_s = float("inf")
    for _ in range(_NUM_TRIALS):
        started = time.perf_counter()
        buffer.max()
        best_s = min(best_s, time.perf_counter() - started)
    return MemorySpeed(buffer.nbytes / best_s, f"measured on one thread over {buffer.nbytes / 1e6:.0f} MB")


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
        WeightReads(
            stage["step_weight_bytes"],
            stage.get("expert_bytes", 0),
            stage.get("chosen_expert_share", 1.0),
            stage.get("num_experts", 0),
            stage.get("num_expert_parts", 1),
        )
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

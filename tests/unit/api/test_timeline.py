"""The figures of a timeline, and its picture."""

from __future__ import annotations

import time

import pytest

from raypp.api.llm import LLM
from raypp.api.timeline import Forward, MemorySpeed, Timeline, gpu_memory_speed, measure_cpu_memory_speed
from raypp.errors import ConfigError
from raypp.models.sizes import WeightReads
from raypp.testing import launch_in_threads
from raypp.types import SamplingParams

MS = 1000


def pipeline(num_steps: int, start_ms: int = 0, first_step: int = 0) -> list[Forward]:
    """Two stages, 10 ms a forward; stage 1 begins a step when stage 0 has ended it; a step every 20 ms."""
    return [
        Forward(
            stage,
            first_step + step,
            (start_ms + 20 * step + 10 * stage) * MS,
            (start_ms + 20 * step + 10 * stage + 10) * MS,
            step % 2,
            3,
            3,
        )
        for step in range(num_steps)
        for stage in (0, 1)
    ]


def timeline(forwards: list[Forward], last_s: float | None = None) -> Timeline:
    # Each stage's weights take 2 ms to read.
    return Timeline.of_last_burst(
        forwards, step_reads=[WeightReads(2000)] * 2, memory_speed=MemorySpeed(1e6, "made up"), last_s=last_s
    )


def test_figures() -> None:
    whole = timeline(pipeline(100))
    assert whole.num_steps == 100
    assert whole.window_us == (10 * MS, 1990 * MS)
    assert whole.bubble_fraction == pytest.approx(0.5, abs=0.01)
    assert whole.share_of_limit == pytest.approx(0.1, abs=0.01)
    assert str(whole) == (
        "100 steps on 2 stages, 1980.0 ms: bubble fraction 0.50, "
        "10.0% of the physical limit (reading the weights at 0 GB/s, made up)"
    )


def test_only_the_last_burst_counts() -> None:
    forwards = pipeline(10) + pipeline(5, start_ms=1000, first_step=10)
    assert timeline(forwards).num_steps == 5
    assert timeline(list(reversed(forwards))).num_steps == 5
    assert timeline(forwards, last_s=0.055).num_steps == 3


def test_too_little_to_say() -> None:
    with pytest.raises(ConfigError, match="nothing to draw"):
        timeline([])
    one = timeline(pipeline(1))
    with pytest.raises(ConfigError, match="no moment"):
        _ = one.bubble_fraction
    assert "too few" in str(one)


def test_without_a_known_memory_speed() -> None:
    unknown = Timeline.of_last_burst(pipeline(5), step_reads=[WeightReads(1)] * 2, memory_speed=None)
    assert unknown.share_of_limit is None
    assert str(unknown).endswith("80.0 ms: bubble fraction 0.50")


def test_memory_speeds() -> None:
    h200 = gpu_memory_speed("NVIDIA H200")
    assert h200 is not None
    assert h200.bytes_per_s == 4.8e12
    assert gpu_memory_speed("Abacus 3000") is None
    measured = measure_cpu_memory_speed(8_000_000)
    assert 1e8 < measured.bytes_per_s < 1e13
    assert "over 8 MB" in measured.source


def test_picture(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    whole = timeline(pipeline(20))
    png = whole._repr_png_()
    assert png is not None
    assert png.startswith(b"\x89PNG")
    whole.save(tmp_path / "timeline.svg")
    assert "stage 1" in (tmp_path / "timeline.svg").read_text()
    axes = whole.plot()
    assert [label.get_text() for label in axes.get_yticklabels()] == ["stage 0", "stage 1"]
    assert sum(len(container) for container in axes.containers) == 40


def test_timeline_of_a_real_engine() -> None:
    with LLM("tiny", num_stages=2, launch=launch_in_threads) as llm:
        with pytest.raises(ConfigError, match="nothing to draw"):
            llm.timeline()
        llm.generate(["a", "b", "c"], SamplingParams(max_tokens=20, ignore_eos=True))
        ends = time.monotonic() + 20.0
        # Steps that were ahead when the last text ended are still on their way through the stages.
        while (whole := llm.timeline()).num_steps != llm.stats()["num_steps"]:
            assert time.monotonic() < ends
        assert {forward.stage_index for forward in whole.forwards} == {0, 1}
        assert 0 <= whole.bubble_fraction < 1
        share = whole.share_of_limit
        assert share is not None
        assert share > 0
        assert llm.timeline(last_s=1e-3).num_steps < whole.num_steps

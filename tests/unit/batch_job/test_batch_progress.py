"""What a job says about itself."""

from __future__ import annotations

import io

import pytest

from raypp.batch_job.answer import Answer
from raypp.batch_job.progress import Progress, Reporter, duration


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_rates_and_time_left() -> None:
    clock = Clock()
    progress = Progress(total=1000, num_done_before=100, num_failed_before=10, clock=clock)
    progress.count(Answer(b"", is_error=True))
    assert progress.line() == "101/1,000 lines (10 %), starting the engine, 11 failed"
    clock.now_s += 30
    progress.engine_runs()
    assert "time left unknown" in progress.line()
    progress.count(Answer(b"", is_error=True))
    for _ in range(90):
        progress.count(Answer(b"", num_prompt_tokens=3, num_output_tokens=20))
    clock.now_s += 10
    progress.num_running = 3
    assert progress.line() == "192/1,000 lines (19 %), 3 running, 9.0 lines/s, 180 tokens/s, 12 failed, 1 min 30 s left"
    clock.now_s += 100
    progress.count(Answer(b""))
    assert progress.rates() == pytest.approx((0.01, 0.0))  # the fast beginning is long ago
    assert progress.num_left == 807
    assert progress.summary().startswith(
        "93 lines answered in 2 min 20 s, the engine ran 1 min 50 s: 91 completed, 2 failed\n"
        "270 prompt tokens, 1,800 generated tokens; 0.8 lines/s, 16.4 tokens/s; peak memory "
    )
    assert progress.summary().endswith("\nin all: 1,000 lines, 181 completed, 12 failed, 807 left")


def test_without_a_terminal_there_are_lines() -> None:
    stream = io.StringIO()
    reporter = Reporter(Progress(total=2, num_done_before=0, clock=Clock()), 7.0, stream)
    assert reporter.interval_s == 7.0
    reporter.show()
    reporter.close()
    assert stream.getvalue().startswith("raypp batch: 0/2 lines (0 %)")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_there_is_a_bar() -> None:
    stream = Terminal()
    progress = Progress(total=4, num_done_before=1)
    reporter = Reporter(progress, 7.0, stream)
    assert reporter.interval_s < 1
    for _ in range(3):
        progress.count(Answer(b"", num_output_tokens=5))
    reporter.show()
    assert "starting the engine" in stream.getvalue()
    progress.engine_runs()
    reporter.close()
    assert "4/4" in stream.getvalue()
    assert "tokens/s, 0 failed" in stream.getvalue()


@pytest.mark.parametrize(("seconds", "text"), [(3.21, "3.2 s"), (125, "2 min 5 s"), (7260, "2 h 1 min")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text

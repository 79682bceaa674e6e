"""How far a job is: counted, shown while it runs (a bar on a terminal, else a line now and then), summed up."""

from __future__ import annotations

import re
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from raypp.batch_job.answer import Answer

if TYPE_CHECKING:
    from tqdm import tqdm

_RATE_WINDOW_S = 60.0


class Progress:
    """Counts of one run, and what earlier runs left."""

    def __init__(
        self,
        total: int,
        num_done_before: int = 0,
        num_failed_before: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to count.

        Args:
            total: Lines of the job.
            num_done_before: Of these, lines that earlier runs answered, errors among them.
            num_failed_before: Of these, errors.
            clock: Returns seconds.
        """
        self.total = total
        self.num_done_before = num_done_before
        self.num_failed_before = num_failed_before
        self.num_done = 0  # in this run
        self.num_failed = 0
        self.num_running = 0  # at the engine now; their tokens count when they are done
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self._clock = clock
        self._start_s = clock()
        self._runs_since_s: float | None = None  # the engine; None: it starts
        self._ran_s = 0.0  # by engines before this one
        self._samples: deque[tuple[float, int, int]] = deque()

    @property
    def num_left(self) -> int:
        """Lines without an answer."""
        return self.total - self.num_done_before - self.num_done

    @property
    def elapsed_s(self) -> float:
        """Seconds since this run began."""
        return self._clock() - self._start_s

    @property
    def has_engine(self) -> bool:
        """Whether the engine has started."""
        return self._runs_since_s is not None

    @property
    def num_completed(self) -> int:
        """Lines with a text, in this run."""
        return self.num_done - self.num_failed

    def engine_starts(self) -> None:
        """Note that there is no engine until `engine_runs`: the time until then is in no rate."""
        self._ran_s = self._engine_s()
        self._runs_since_s = None

    def engine_runs(self) -> None:
        """Note that the engine has started."""
        self._runs_since_s = self._clock()
        self._samples = deque([(self._runs_since_s, self.num_completed, self.num_output_tokens)])

    def count(self, answer: Answer) -> None:
        """Take in an answer that was written."""
        self.num_done += 1
        self.num_failed += answer.is_error
        self.num_prompt_tokens += answer.num_prompt_tokens
        self.num_output_tokens += answer.num_output_tokens

    def totals(self) -> str:
        """Return how far all runs of the job came."""
        num_failed = self.num_failed_before + self.num_failed
        left = f", {self.num_left:,} left" if self.num_left else ""
        return (
            f"{self.total:,} lines, {self.total - self.num_left - num_failed:,} completed, {num_failed:,} failed{left}"
        )

    def rates(self) -> tuple[float, float]:
        """Return completed lines and generated tokens per second, over the last minute in which the engine ran.

        Refused lines are left out: they take no time, and would promise an early end.
        """
        if self._runs_since_s is None:
            return 0.0, 0.0
        now_s = self._clock()
        self._samples.append((now_s, self.num_completed, self.num_output_tokens))
        while len(self._samples) > 2 and self._samples[1][0] < now_s - _RATE_WINDOW_S:
            self._samples.popleft()
        then_s, done, tokens = self._samples[0]
        seconds = max(now_s - then_s, 1e-9)
        return (self.num_completed - done) / seconds, (self.num_output_tokens - tokens) / seconds

    def line(self) -> str:
        """Return where the job stands, in one line."""
        done = self.num_done_before + self.num_done
        num_failed = self.num_failed_before + self.num_failed
        state = f"{done:,}/{self.total:,} lines ({100 * done / self.total:.0f} %)"
        if not self.has_engine:
            return f"{state}, starting the engine, {num_failed:,} failed"
        lines_per_s, tokens_per_s = self.rates()
        left = f"{duration(self.num_left / lines_per_s)} left" if lines_per_s else "time left unknown"
        return (
            f"{state}, {self.num_running:,} running, "
            f"{lines_per_s:,.1f} lines/s, {tokens_per_s:,.0f} tokens/s, {num_failed:,} failed, {left}"
        )

    def summary(self) -> str:
        """Return what this run did."""
        engine_s = self._engine_s()
        seconds = max(engine_s, 1e-9)
        return (
            f"{self.num_done:,} lines answered in {duration(self.elapsed_s)}, the engine ran {duration(engine_s)}: "
            f"{self.num_completed:,} completed, {self.num_failed:,} failed\n"
            f"{self.num_prompt_tokens:,} prompt tokens, {self.num_output_tokens:,} generated tokens; "
            f"{self.num_completed / seconds:,.1f} lines/s, {self.num_output_tokens / seconds:,.1f} tokens/s"
            f"{_peak_memory()}\n"
            f"in all: {self.totals()}"
        )

    def _engine_s(self) -> float:
        """Return for how many seconds of this run there was an engine."""
        return self._ran_s + (0.0 if self._runs_since_s is None else self._clock() - self._runs_since_s)


class Reporter:
    """Shows a job's progress."""

    def __init__(self, progress: Progress, interval_s: float, stream: TextIO | None = None) -> None:
        """Begin.

        Args:
            progress: What is shown.
            interval_s: Between two lines, where there is no terminal.
            stream: Where to; None is stderr.
        """
        self._progress = progress
        self._stream = stream or sys.stderr
        self._bar: tqdm | None = None
        if self._stream.isatty():
            from tqdm import tqdm

            total, done = progress.total, progress.num_done_before
            self._bar = tqdm(total=total, initial=done, unit="line", file=self._stream)
        self.interval_s = 0.2 if self._bar is not None else interval_s

    def show(self) -> None:
        """Show the state of now."""
        progress = self._progress
        if self._bar is None:
            print(f"raypp batch: {progress.line()}", file=self._stream, flush=True)
            return
        num_failed = progress.num_failed_before + progress.num_failed
        _, tokens_per_s = progress.rates()
        work = f"{progress.num_running:,} running, {tokens_per_s:,.0f} tokens/s"
        state = work if progress.has_engine else "starting the engine"
        self._bar.set_postfix_str(f"{state}, {num_failed:,} failed")  # drawn also where no line is done
        self._bar.update(progress.num_done_before + progress.num_done - self._bar.n)

    def close(self) -> None:
        """Leave the last state on the screen."""
        if self._bar is not None:
            self.show()
            self._bar.close()


def _peak_memory() -> str:
    """Return this process's peak memory as a part of a sentence; nothing where the system does not tell."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return ""
    match = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    return f"; peak memory {int(match[1]) / 1024:,.0f} MB (this process, without the stages)" if match else ""


def duration(seconds: float) -> str:
    """Return seconds as people say them."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"

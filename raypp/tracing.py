"""What each process did when: recorded in memory, written as a Chrome trace, read back as a bubble fraction.

A lane is one process: `driver`, `stage 0`, `stage 1`, .... A stage's lane holds, per step, a `forward` (the model's own
work, nothing else; on a GPU when the GPU did it) and a `host` (all that the stage's thread did for the step; on a GPU
that is queueing, mostly ahead of the forward). A step that is no full graph has a `wait` too (for its input, and making
it ready), and on the last stage a `sample`. Times are CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from raypp.errors import ConfigError
from raypp.messages import StageReport, StepForm, Unrecorded

DRIVER_LANE = "driver"
FORWARD = "forward"
HOST = "host"

now_ns = time.monotonic_ns

_MAX_UNREPORTED = 2048  # forwards between two reports; older ones are only in the sums


class TraceEvent(NamedTuple):
    """One thing that a lane did."""

    name: str
    step_id: int
    start_ns: int
    end_ns: int


class ForwardCounter:
    """Adds up a stage's forwards, and keeps the last of them until they are reported. One thread adds, one reports."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._num_told = 0
        self._busy_ns = 0
        self._copy_wait_ns = 0
        self._new: deque[tuple[int, int, int, int]] = deque(maxlen=_MAX_UNREPORTED)
        self._reported: deque[tuple[int, int, int, int]] = deque(maxlen=_MAX_UNREPORTED)  # until that got through
        self._num_unrecorded = np.zeros(len(Unrecorded), np.int64)

    @property
    def has_news(self) -> bool:
        """Whether there were forwards since the last report that got through."""
        return self._num_told != self._num_steps

    def add(self, step_id: int, start_ns: int, end_ns: int, form: StepForm = StepForm.EAGER) -> None:
        """Count one forward."""
        self._busy_ns += end_ns - start_ns
        self._new.append((step_id, start_ns, end_ns, form))
        self._num_steps += 1  # last: whoever reports these sums reports the forward, too

    def add_copy_wait(self, wait_ns: int) -> None:
        """Count for how long a step waited for KV blocks that are copied."""
        self._copy_wait_ns += wait_ns

    def add_unrecorded(self, why: Unrecorded) -> None:
        """Count a step that ran without a graph, before its forward is counted."""
        self._num_unrecorded[why] += 1

    def note_told(self, report: StageReport) -> None:
        """Say that a report got through. From the thread that reports."""
        self._num_told = report.num_steps
        self._reported.clear()

    def report(self) -> StageReport:
        """Return the sums, and the forwards since the last report that got through."""
        num_steps, busy_ns = self._num_steps, self._busy_ns
        to_epoch_ns = time.time_ns() - now_ns()
        self._reported.extend([self._new.popleft() for _ in range(len(self._new))])
        columns = np.array(self._reported, np.int64).reshape(-1, 4)
        times_us = (columns[:, 1:3] + to_epoch_ns) // 1000
        return StageReport(
            num_steps=num_steps,
            busy_ns=busy_ns,
            copy_wait_ns=self._copy_wait_ns,
            step_ids=np.ascontiguousarray(columns[:, 0]),
            start_us=np.ascontiguousarray(times_us[:, 0]),
            end_us=np.ascontiguousarray(times_us[:, 1]),
            forms=np.ascontiguousarray(columns[:, 3]),
            num_unrecorded=self._num_unrecorded.copy(),
        )


class Tracer:
    """Records what one process does. A tracer that is not enabled only counts the forwards.

    Attributes:
        forwards: The sums of the forwards.
    """

    def __init__(self, lane: str, *, enabled: bool, max_events: int = 1_000_000) -> None:
        self.lane = lane
        self.enabled = enabled
        self.forwards = ForwardCounter()
        self._max_events = max_events
        self._events: list[TraceEvent] = []

    def record(self, name: str, step_id: int, start_ns: int, end_ns: int, form: StepForm = StepForm.EAGER) -> None:
        """Remember that `name` was done for a step, a forward with its form; of too many the oldest half goes."""
        if name is FORWARD:
            self.forwards.add(step_id, start_ns, end_ns, form)
        if self.enabled:
            if len(self._events) >= self._max_events:
                del self._events[: self._max_events // 2]
            self._events.append(TraceEvent(name, step_id, start_ns, end_ns))

    def events(self) -> list[TraceEvent]:
        """Return what was recorded, oldest first."""
        return list(self._events)


@dataclass(frozen=True)
class Lane:
    """The events of one process."""

    name: str
    events: Sequence[TraceEvent]


def write_chrome_trace(path: str | Path, lanes: Iterable[Lane]) -> None:
    """Write lanes as a Chrome trace (chrome://tracing, Perfetto): one thread per lane, times in microseconds."""
    records: list[dict[str, Any]] = []
    for index, lane in enumerate(lanes):
        records.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": index, "args": {"name": lane.name}})
        records.extend(
            {
                "ph": "X",
                "name": event.name,
                "pid": 0,
                "tid": index,
                "ts": event.start_ns / 1e3,
                "dur": (event.end_ns - event.start_ns) / 1e3,
                "args": {"step_id": event.step_id},
            }
            for event in lane.events
        )
    Path(path).write_text(json.dumps({"traceEvents": records, "displayTimeUnit": "ms"}))


def read_chrome_trace(path: str | Path) -> list[Lane]:
    """Return the lanes that `write_chrome_trace` wrote.

    Raises:
        ConfigError: not such a file.
    """
    try:
        records = json.loads(Path(path).read_text())["traceEvents"]
        names = {r["tid"]: r["args"]["name"] for r in records if r["ph"] == "M"}
        events: dict[int, list[TraceEvent]] = {tid: [] for tid in names}
        for r in records:
            if r["ph"] == "X":
                start_ns = round(r["ts"] * 1e3)
                step_id = r["args"]["step_id"]
                events[r["tid"]].append(TraceEvent(r["name"], step_id, start_ns, start_ns + round(r["dur"] * 1e3)))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is not a trace of raypp", got=repr(error), hint='make one with LLM(..., trace="trace.json")'
        ) from error
    return [Lane(names[tid], events[tid]) for tid in sorted(names)]


def bubble_fraction(path: str | Path) -> float:
    """Return the share of the stages' time, 0..1, in which they ran no model, fill and drain excluded.

    The window opens when the last stage starts its first forward (the pipe is full) and closes when the first stage
    ends its last one (the pipe drains). Only `forward` counts as work: waiting, planning and sampling are bubble.

    Raises:
        ConfigError: not a trace of raypp, or one in which the pipe was never full.
    """
    stages = [lane for lane in read_chrome_trace(path) if lane.name != DRIVER_LANE]
    forwards = [[e for e in lane.events if e.name == FORWARD] for lane in stages]
    if not forwards or not all(forwards):
        raise ConfigError(f"{path} has stages without a single step", hint="generate something before reading it")
    opens = max(events[0].start_ns for events in forwards)
    closes = min(events[-1].end_ns for events in forwards)
    if closes <= opens:
        raise ConfigError(f"{path} has no moment in which every stage had work", hint="generate more tokens")
    busy = sum(
        max(0, min(event.end_ns, closes) - max(event.start_ns, opens)) for events in forwards for event in events
    )
    return 1.0 - busy / ((closes - opens) * len(forwards))

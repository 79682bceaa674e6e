"""Times a stage's forwards: by the host's clock on a CPU, by events in the stream on a GPU.

On a GPU the host queues work and goes on, so what its own clock says of a step is when it was queued. Events say when
the work was done; they are read later, once they have passed, and never waited for.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

import torch

from raypp.messages import StepForm
from raypp.tracing import FORWARD, Tracer, now_ns
from raypp.transport.gpu_access import CurrentStream


class ForwardClock(Protocol):
    """Notes forwards in a tracer."""

    def begin(self, step_id: int, form: StepForm) -> None:
        """Note that a step's input is there and its forward begins."""

    def end(self) -> None:
        """Note that the forward that began last has ended."""

    def read(self) -> None:
        """Record what has become known meanwhile. Once per step, when the step has all that it waits for."""

    def catch_up(self) -> bool:
        """Record what has become known since the last step; return whether that is everything. Between steps."""


class HostForwardClock:
    """For stages whose calls return when the work is done."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._step_id = 0
        self._form = StepForm.CALLED
        self._began_ns = 0

    def begin(self, step_id: int, form: StepForm) -> None:
        """Note the time."""
        self._step_id, self._form, self._began_ns = step_id, form, now_ns()

    def end(self) -> None:
        """Record the forward."""
        self._tracer.record(FORWARD, self._step_id, self._began_ns, now_ns(), self._form)

    def read(self) -> None:
        """Everything is known already."""

    def catch_up(self) -> bool:
        """Everything is known already."""
        return True


@dataclass(frozen=True, slots=True)
class _Span:
    step_id: int
    form: StepForm
    began: torch.cuda.Event
    ended: torch.cuda.Event


class CudaForwardClock:
    """For stages that queue their work on the current stream.

    It is made when the device has nothing to do: that moment joins its clock to the host's. From then on each event is
    timed from the last one that passed, so that no difference outgrows its float.
    """

    def __init__(self, tracer: Tracer, device: torch.device) -> None:
        self._tracer = tracer
        self._passing: deque[_Span] = deque()
        self._free: list[torch.cuda.Event] = []
        self._current = CurrentStream(device)
        self._anchor = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        self._anchor.record()
        self._anchor.synchronize()
        self._anchor_ns = now_ns()

    def begin(self, step_id: int, form: StepForm) -> None:
        """Queue an event."""
        span = _Span(step_id, form, self._event(), self._event())
        span.began.record(self._current.get())
        self._passing.append(span)

    def end(self) -> None:
        """Queue an event."""
        self._passing[-1].ended.record(self._current.get())

    def read(self) -> None:
        """Record the forwards that the device has passed. The newest is queued just now, and left for the next call."""
        self._record_but(1)

    def catch_up(self) -> bool:
        """Record the forwards that the device has passed: without it the last ones of a burst were never told of."""
        self._record_but(0)
        return not self._passing

    def _record_but(self, num_newest: int) -> None:
        while len(self._passing) > num_newest and self._passing[0].ended.query():
            self._record(self._passing.popleft())

    def _record(self, span: _Span) -> None:
        began_ns = self._anchor_ns + round(self._anchor.elapsed_time(span.began) * 1e6)
        ended_ns = began_ns + round(span.began.elapsed_time(span.ended) * 1e6)
        self._tracer.record(FORWARD, span.step_id, began_ns, ended_ns, span.form)
        self._free += (span.began, self._anchor)
        self._anchor, self._anchor_ns = span.ended, ended_ns

    def _event(self) -> torch.cuda.Event:
        return self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)


def forward_clock(tracer: Tracer, device: torch.device) -> ForwardClock:
    """Return the clock for a device."""
    return CudaForwardClock(tracer, device) if device.type == "cuda" else HostForwardClock(tracer)

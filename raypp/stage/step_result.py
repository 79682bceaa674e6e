"""What the device says later: the tokens that a step yielded, and when its forward ran.

The stage goes on while a result is on its way from the device to the host: the thread that sends the result waits for
it. On a GPU the host queues work and goes on, so what its own clock says of a step is when it was queued. Events say
when the work was done; they are read later, once they have passed, and never waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from raypp.messages import NO_BYTES, NO_INT32S, Bytes, Int32s, StepForm, StepResult
from raypp.ops.row_tokens import StepTokens
from raypp.stage.step_batch import StepBatch
from raypp.tracing import FORWARD, Tracer, now_ns
from raypp.transport.gpu_access import CurrentStream

_ONE_EACH = ("token_ids",)


@dataclass(frozen=True, eq=False)
class PackedResult:
    """The columns of a `StepResult`, of the rows that yield, side by side in one tensor: one copy brings it here."""

    packed: torch.Tensor  # [Y, W] int32
    names: tuple[str, ...]  # in their order
    widths: tuple[int, ...]

    @classmethod
    def of(cls, tokens: StepTokens, *, has_drafts: bool = False) -> PackedResult:
        """Return those of a step's tokens; the next drafts only where the driver follows grammars."""
        token_ids = tokens.token_ids if tokens.reported_ids is None else tokens.reported_ids
        if tokens.num_valid is None:
            return cls(token_ids, _ONE_EACH, (token_ids.shape[1],))
        names, columns = ["token_ids", "num_valid"], [token_ids, tokens.num_valid.unsqueeze(1)]
        if tokens.num_drafted is not None and tokens.num_matched is not None:
            names += ["num_drafted", "num_matched"]
            columns += [tokens.num_drafted.unsqueeze(1), tokens.num_matched.unsqueeze(1)]
        if has_drafts and tokens.draft_ids is not None:
            names.append("draft_ids")
            columns.append(tokens.draft_ids)
        return cls(torch.cat(columns, dim=1), tuple(names), tuple([column.shape[1] for column in columns]))

    def read(self, packed: Int32s, batch: StepBatch, without: tuple[str, ...]) -> dict[str, Int32s]:
        """Return the columns of all rows of a step.

        Args:
            packed: What was copied to the host, [Y or more, W]: padding lies behind the rows.
            batch: The step.
            without: Columns that do not count.
        """
        read, first, num_yielding = {}, 0, len(batch.sampled_np)
        for name, width in zip(self.names, self.widths, strict=True):
            if name not in without:
                values = packed[:num_yielding, first : first + width]
                if name.startswith("num_"):
                    values = values[:, 0]
                if batch.all_sample:
                    read[name] = np.ascontiguousarray(values)
                else:
                    nothing = 0 if name.startswith("num_") else -1
                    read[name] = np.full((batch.num_rows, *values.shape[1:]), nothing, np.int32)
                    read[name][batch.sampled_np] = values
            first += width
        if "num_valid" not in read:
            read["num_valid"] = batch.samples_np.astype(np.int32)
        return read


def write_feedback(feedback: dict[str, torch.Tensor], batch: StepBatch, tokens: StepTokens) -> None:
    """Write a step's message to the first stage; see `transport.schema.feedback_schema`. Its width is that of K_max."""
    assert tokens.lengths is not None
    width = tokens.token_ids.shape[1]
    columns = [
        (feedback["length"], tokens.lengths.to(torch.int32)),
        (feedback["token_ids"][:, :width], tokens.token_ids),
    ]
    if tokens.draft_ids is not None:
        columns.append((feedback["draft_ids"], tokens.draft_ids))
    for view, values in columns:
        if batch.all_sample:
            view.copy_(values)
        else:
            view.fill_(-1).index_copy_(0, batch.sampled, values)


class PendingResult:
    """Made right after the copies to the host were queued; complete once these are done."""

    def __init__(self, make: Callable[[], StepResult], copied: torch.cuda.Event | None = None) -> None:
        """Note what is to come.

        Args:
            make: Builds the result from what was copied.
            copied: Passes when that is there; None: it is.
        """
        self._make = make
        self._copied = copied

    def wait(self) -> StepResult:
        """Return the result; blocks until it is there, without the GIL. From any thread.

        Its arrays may lie in the ring's memory: to be sent or copied before the entry is used again.
        """
        if self._copied is not None:
            self._copied.synchronize()
        return self._make()


class ResultRing:
    """Where results arrive on the host: memory and events that are made once.

    An entry is used again after `num_entries` steps; by then its result was sent, for the driver has had it before it
    dispatched the step that uses it again.

    Args:
        num_entries: Steps in flight.
        max_values: The most values of a result.
        device: Where they come from.
    """

    def __init__(self, num_entries: int, max_values: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._entries = torch.zeros(num_entries, max_values, dtype=torch.int32, pin_memory=is_cuda).unbind()
        # Blocking: the waiting thread sleeps, a core is not spent on it.
        self._copied = [torch.cuda.Event(blocking=True) if is_cuda else None for _ in self._entries]
        self._current = CurrentStream(device) if is_cuda else None
        self._views: dict[tuple[int, torch.Size], tuple[torch.Tensor, Int32s]] = {}

    def fetch(
        self,
        batch: StepBatch,
        result: PackedResult,
        logprobs: Callable[[], Bytes] | None = None,
        without: tuple[str, ...] = (),
    ) -> PendingResult:
        """Queue the copy of a step's result.

        Args:
            batch: The step.
            result: Of the rows that yield, and of padding behind them.
            logprobs: Packs the `StepLogprobs`; their copies are on their way already.
            without: Columns of the result that do not count.
        """
        step_id, values = batch.plan.step_id, result.packed
        index = step_id % len(self._entries)
        view = self._views.get((index, values.shape))
        if view is None:
            into = self._entries[index][: values.numel()].view(values.shape)
            view = self._views[index, values.shape] = into, np.asarray(into)
        into, into_np = view
        into.copy_(values, non_blocking=True)
        copied = self._copied[index]
        if copied is not None:
            assert self._current is not None
            copied.record(self._current.get())

        def make() -> StepResult:
            columns = {"num_drafted": NO_INT32S, "num_matched": NO_INT32S, "draft_ids": NO_INT32S}
            columns |= result.read(into_np, batch, without)
            return StepResult(step_id=step_id, logprobs=NO_BYTES if logprobs is None else logprobs(), **columns)

        return PendingResult(make, copied)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Queue a copy to the host; what is returned may be read once a `PendingResult` made after it is complete.

    On a CPU it is a copy too: the tensor's memory may be a link's slot.
    """
    if tensor.device.type == "cpu":
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


class HostForwardClock:
    """For stages whose calls return when the work is done."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._step_id = 0
        self._form = StepForm.EAGER
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


def forward_clock(tracer: Tracer, device: torch.device) -> HostForwardClock | CudaForwardClock:
    """Return the clock for a device."""
    return CudaForwardClock(tracer, device) if device.type == "cuda" else HostForwardClock(tracer)

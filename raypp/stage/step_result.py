"""The tokens that a step yielded, and their way to the first stage, and to the driver.

The stage goes on while a result is on its way from the device to the host: whoever sends the result waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from raypp.messages import NO_INT32S, Bytes, Int32s, StepPlan, StepResult
from raypp.stage.step_shape import StepShape
from raypp.transport.gpu_access import CurrentStream


@dataclass(frozen=True, eq=False)
class StepTokens:
    """The tokens of the Y rows that yield, `StepShape.sampled` of the step's R rows; K drafts were verified."""

    token_ids: torch.Tensor  # [Y, 1 + K] int32, valid up to num_valid
    positions: torch.Tensor  # [Y] int64, of the first of them
    lengths: torch.Tensor  # [Y] int64, of the rows, the new tokens included
    num_valid: torch.Tensor | None = None  # [Y] int32; None: 1 each
    num_drafted: torch.Tensor | None = None  # [Y] int32, see `StepResult`; None: nobody drafts
    num_matched: torch.Tensor | None = None  # [Y] int32, likewise
    draft_ids: torch.Tensor | None = None  # [Y, K_max] int32, the next drafts
    told_ids: torch.Tensor | None = None  # [Y, 1 + K] int32, -1 where logits were not finite; None: nowhere

    @classmethod
    def one_each(cls, told_ids: torch.Tensor, positions: torch.Tensor) -> StepTokens:
        """Return the tokens of a step without speculation. Shapes: told_ids [Y] int32; positions [Y] int64."""
        told_ids = told_ids.unsqueeze(1)
        return cls(told_ids.clamp(min=0), positions, positions + 1, told_ids=told_ids)


def write_feedback(feedback: dict[str, torch.Tensor], shape: StepShape, tokens: StepTokens) -> None:
    """Write a step's message to the first stage; see `transport.schema.feedback_schema`. Its width is that of K_max."""
    width = tokens.token_ids.shape[1]
    columns = [
        (feedback["length"], tokens.lengths.to(torch.int32)),
        (feedback["token_ids"][:, :width], tokens.token_ids),
    ]
    if tokens.draft_ids is not None:
        columns.append((feedback["draft_ids"], tokens.draft_ids))
    for view, values in columns:
        if shape.all_sample:
            view.copy_(values)
        else:
            view.fill_(-1).index_copy_(0, shape.sampled, values)


@dataclass(frozen=True, eq=False)
class ToldTokens:
    """What the driver is told of a step's tokens, side by side in one tensor: one copy brings it to the host."""

    packed: torch.Tensor  # [Y, W] int32
    columns: dict[str, slice]  # which of these is what; see `StepResult`

    @classmethod
    def of(cls, tokens: StepTokens, *, tells_drafts: bool = False) -> ToldTokens:
        """Return what is told of these tokens; the next drafts only where the driver follows grammars."""
        columns = {
            "token_ids": tokens.token_ids if tokens.told_ids is None else tokens.told_ids,
            "num_valid": tokens.num_valid,
            "num_drafted": tokens.num_drafted,
            "num_matched": tokens.num_matched,
            "draft_ids": tokens.draft_ids if tells_drafts else None,
        }
        wide = {
            name: column.unsqueeze(1) if column.dim() == 1 else column
            for name, column in columns.items()
            if column is not None
        }
        packed = wide["token_ids"] if len(wide) == 1 else torch.cat(list(wide.values()), dim=1)
        ends = accumulate(column.shape[1] for column in wide.values())
        return cls(packed, {name: slice(end - wide[name].shape[1], end) for name, end in zip(wide, ends, strict=True)})

    def without(self, *names: str) -> ToldTokens:
        """Return the same but for these columns."""
        return ToldTokens(self.packed, {name: at for name, at in self.columns.items() if name not in names})


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

    def fetch(self, step_id: int, values: torch.Tensor, make: Callable[[Int32s], StepResult]) -> PendingResult:
        """Queue the copy of a step's values, int32 of any shape; `make` builds the result from them.

        What was queued before, to other memory of the host, is there too when the result is.
        """
        index = step_id % len(self._entries)
        into, into_np = self._view(index, values.shape)
        into.copy_(values, non_blocking=True)
        copied = self._copied[index]
        if copied is not None:
            assert self._current is not None
            copied.record(self._current.get())
        return PendingResult(lambda: make(into_np), copied)

    def _view(self, index: int, shape: torch.Size) -> tuple[torch.Tensor, Int32s]:
        view = self._views.get((index, shape))
        if view is None:
            into = self._entries[index][: shape.numel()].view(shape)
            into_np: Int32s = np.asarray(into)
            view = self._views[index, shape] = into, into_np
        return view


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Queue a copy to the host; what is returned may be read once a `PendingResult` made after it is complete.

    On a CPU it is a copy too: the tensor's memory may be a link's slot.
    """
    if tensor.device.type == "cpu":
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def step_result(
    results: ResultRing, plan: StepPlan, shape: StepShape, told: ToldTokens, logprobs: Callable[[], Bytes]
) -> PendingResult:
    """Return what the driver is told, on its way to the host.

    Args:
        results: Where it arrives.
        plan: The step.
        shape: Its rows, without padding.
        told: Of the rows that yield, and of padding behind them.
        logprobs: Packs the `StepLogprobs`; their copies are on their way already.
    """

    def make(packed: Int32s) -> StepResult:
        def by_row(name: str, nothing: int) -> Int32s:
            """Return a column of the rows that yield as one of all rows."""
            if name not in told.columns:
                return NO_INT32S
            values = packed[: len(shape.sampled_np), told.columns[name]]
            if name.startswith("num_"):
                values = values[:, 0]
            if shape.all_sample:
                return np.ascontiguousarray(values)
            spread = np.full((shape.num_rows, *values.shape[1:]), nothing, np.int32)
            spread[shape.sampled_np] = values
            return spread

        return StepResult(
            step_id=plan.step_id,
            token_ids=by_row("token_ids", -1),
            num_valid=by_row("num_valid", 0) if "num_valid" in told.columns else shape.samples_np.astype(np.int32),
            num_drafted=by_row("num_drafted", 0),
            num_matched=by_row("num_matched", 0),
            logprobs=logprobs(),
            draft_ids=by_row("draft_ids", -1),
        )

    return results.fetch(plan.step_id, told.packed, make)

"""A step's result on its way from the device to the host. The stage goes on; whoever sends the result waits for it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from raypp.messages import Int32s, StepResult
from raypp.transport.current_stream import CurrentStream


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

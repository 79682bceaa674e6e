"""A step's result on its way from the device to the host. The stage goes on; whoever sends the result waits for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from raypp.messages import StepResult


class PendingResult:
    """Made right after the copies to the host were queued; complete once these are done."""

    def __init__(self, device: torch.device, make: Callable[[], StepResult]) -> None:
        """Note the moment in the device's order of work.

        Args:
            device: Where the step runs.
            make: Builds the result from what was copied.
        """
        self._make = make
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            # Blocking: the waiting thread sleeps, a core is not spent on it.
            self._copied = torch.cuda.Event(blocking=True)
            self._copied.record()

    def wait(self) -> StepResult:
        """Return the result; blocks until it is there, without the GIL. From any thread."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._make()


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Queue a copy to the host; what is returned may be read once a `PendingResult` made after it is complete.

    On a CPU it is a copy too: the tensor's memory may be a link's slot.
    """
    if tensor.device.type == "cpu":
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def columns_to_host(columns: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Queue the copies of several tensors as one copy; see `to_host`. Returns views of it, in their shapes.

    Shapes: each [Y] or [Y, n], all of one type.
    """
    if len(columns) == 1:
        return [to_host(columns[0])]
    wide = [column.unsqueeze(1) if column.dim() == 1 else column for column in columns]
    joined = torch.cat(wide, dim=1)
    if joined.device.type != "cpu":
        joined = to_host(joined)
    parts = joined.split([part.shape[1] for part in wide], dim=1)
    return [part.squeeze(1) if column.dim() == 1 else part for part, column in zip(parts, columns, strict=True)]

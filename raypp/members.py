"""The members of a stage, as one of them sees them: sums, exchanges, and what the first one decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class MemberMemory(Protocol):
    """What the members of a stage have in GPUs that reach each other; see `raypp.ops.cuda.member_sums`."""

    addresses: torch.Tensor
    """Int64 [count], on the device: of each member's allocation, as this process sees it."""
    counts: torch.Tensor
    """Int32 [programs], on the device: of the sums so far."""
    stop: torch.Tensor
    """Int32 [1], on the device: not 0 ends all waits."""
    max_bytes: int
    """The largest tensor that is summed there."""

    def abort(self) -> None:
        """End all waits on the device, from any thread."""

    def close(self) -> None:
        """Release it; from the thread that used it."""


class Members(Protocol):
    """The members of one stage, from one of them."""

    rank: int
    count: int

    @property
    def memory(self) -> MemberMemory | None:
        """Where small sums are made by kernels alone; None: by `sum_`."""

    @property
    def is_alone(self) -> bool:
        """Whether the others take no part for now: while a stage is built, each member computes for itself."""

    def sum_(self, x: torch.Tensor) -> torch.Tensor:
        """Replace a tensor by the sum of all members' tensors, and return it.

        Raises:
            DeadlineError: another member did not come in time.
            StageDiedError: another member is gone.
            EngineDeadError: `abort` was called.
        """

    def gathered(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the tensors of all members by rank, [count, ...]. Raises as `sum_`. Shapes: x [...], alike for all.

        Args:
            x: This member's.
            out: Where to put them, contiguous; None: anywhere.
        """

    def from_first(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the tensor of host memory, int32 [n], that the first member makes. Raises as `sum_`.

        Args:
            make: Called on the first member alone.
        """

    def abort(self) -> None:
        """End all waits with an error, from any thread. The members cannot meet again."""

    def close(self) -> None:
        """Release everything."""


class LoneMember:
    """A member whose others take no part: each sum is of its own part, and what it gathers is its own, for each.

    Args:
        count: Members that there would be.
    """

    rank = 0
    memory = None
    is_alone = True

    def __init__(self, count: int) -> None:
        self.count = count

    def sum_(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gathered(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        parts = x.expand(self.count, *x.shape)
        return parts.contiguous() if out is None else out.copy_(parts)

    def from_first(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        return make()

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass

"""What the members of a stage do together: sums, joined columns, and bytes that the first one sends to the others.

All members call the same operations in the same order. Sums are in the order of ranks, so their bits are the same on
all members.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Members(Protocol):
    """The members of one stage, from one of them."""

    rank: int
    count: int

    def sum_(self, x: torch.Tensor) -> torch.Tensor:
        """Replace a tensor by the sum of all members' tensors, and return it.

        Raises:
            DeadlineError: another member did not come in time.
            StageDiedError: another member is gone.
            EngineDeadError: `abort` was called.
        """

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        """Return the columns of all members side by side, [N, count * C]. Shapes: x [N, C]. Raises as `sum_`."""

    def from_first(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the tensor of host memory, int32 [n], that the first member makes. Raises as `sum_`.

        Args:
            make: Called on the first member alone.
        """

    def abort(self) -> None:
        """End all waits with an error, from any thread. The members cannot meet again."""

    def close(self) -> None:
        """Release everything."""


def in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of tensors, in their order."""
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total

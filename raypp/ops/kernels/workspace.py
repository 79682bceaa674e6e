"""Scratch memory that kernels share: partial results of split work, and counters of who has finished.

One compute stream uses it, kernel after kernel, so all can have the same bytes. Addresses never change once a kernel
has used them: graphs hold them.
"""

from __future__ import annotations

import torch

_NUM_COUNTERS = 1 << 16


class Workspace:
    """Allocated at first use, as large as the most that was reserved until then.

    Args:
        device: Where it is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._num_floats = 0
        self._floats: torch.Tensor | None = None
        self._counters: torch.Tensor | None = None

    def reserve(self, num_floats: int) -> None:
        """Say that a kernel will need so many. All reserve before any runs."""
        if num_floats > self._num_floats:
            assert self._floats is None, "reserved after the first use"
            self._num_floats = num_floats

    @property
    def floats(self) -> torch.Tensor:
        """Float32, of any content."""
        if self._floats is None:
            self._floats = torch.empty(self._num_floats, dtype=torch.float32, device=self._device)
        return self._floats

    @property
    def counters(self) -> torch.Tensor:
        """Int32, all zero between kernels; one per piece of work that several programs share."""
        if self._counters is None:
            self._counters = torch.zeros(_NUM_COUNTERS, dtype=torch.int32, device=self._device)
        return self._counters

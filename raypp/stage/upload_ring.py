"""What the host tells the device of a step: one small copy into a buffer with a fixed address.

The host runs ahead of the device, so every step in flight has its own pinned memory. An entry is used again after
`num_entries` steps; by then its copy is long done, for the driver has had that step's result before it dispatched this
one.
"""

from __future__ import annotations

import torch

from raypp.messages import Int64s


class UploadRing:
    """A device buffer and a ring of host buffers.

    Args:
        num_entries: Steps in flight.
        max_values: The most values of a step.
        device: Where they go.
    """

    def __init__(self, num_entries: int, max_values: int, device: torch.device) -> None:
        self.values = torch.zeros(max_values, dtype=torch.int64, device=device)
        """Where the values of the step arrive, int64 [max_values]."""
        self._host = torch.zeros(num_entries, max_values, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._host_np: Int64s = self._host.numpy()
        self._copies: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}  # by entry and number: to, from

    def entry(self, step_id: int) -> Int64s:
        """Return the host's buffer for a step, int64 [max_values], to be filled."""
        entry: Int64s = self._host_np[step_id % len(self._host_np)]
        return entry

    def upload(self, step_id: int, num_values: int) -> None:
        """Queue the copy of the entry's first values to the device."""
        key = (step_id % len(self._host_np), num_values)
        copy = self._copies.get(key)
        if copy is None:
            copy = self._copies[key] = self.values[:num_values], self._host[key[0]][:num_values]
        copy[0].copy_(copy[1], non_blocking=True)

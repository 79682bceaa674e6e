"""What recorded decode steps read and write at addresses that stay: what the host uploads, and messages of links.

The host runs ahead of the device, so every step in flight has pinned memory of its own. It is used again after
`num_entries` steps: by then the driver has had the step's result. A recording repeats its addresses, and a step's
message lies in another slot each time: the slot's number is uploaded with all else, so the host launches no copy.
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


_WORD = torch.int64
"""Messages are moved in words: a byte per thread would take eight times as many threads. Their parts are aligned."""


class MessageSlots:
    """Copies messages between a buffer and the slots of a link.

    Args:
        slots: uint8 [num_slots, slot_bytes], see `raypp.transport.link`; sizes are multiples of 8, as are those of
            messages.
        buffer: uint8 [slot_bytes].
        index: int64 [1], on the same device: the slot of the step that runs.
    """

    def __init__(self, slots: torch.Tensor, buffer: torch.Tensor, index: torch.Tensor) -> None:
        self.num_slots = len(slots)
        self._slots = slots.view(_WORD)
        self._buffer = buffer.view(_WORD).unsqueeze(0)
        self._index = index

    def read(self, num_bytes: int, is_there: torch.Tensor) -> None:
        """Copy the start of the slot to the buffer; zeros where is_there, int64 [1], is 0 and not 1: no message is."""
        words = num_bytes // _WORD.itemsize
        into = self._buffer[:, :words]
        torch.index_select(self._slots[:, :words], 0, self._index, out=into)
        into.mul_(is_there)

    def write(self, num_bytes: int) -> None:
        """Copy the start of the buffer to the start of the slot."""
        words = num_bytes // _WORD.itemsize
        self._slots[:, :words].index_copy_(0, self._index, self._buffer[:, :words])

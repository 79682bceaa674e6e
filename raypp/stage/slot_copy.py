"""Copies between a link's slots and a buffer, as part of a recording.

A recording repeats its addresses, and a step's message lies in another slot each time. So which slot it is, a number on
the device says, that the host uploads with all else it knows of the step: no copy is left for the host to launch.

While recordings are made the neighbours make theirs, and what they write into the slots meanwhile is no message.
"""

from __future__ import annotations

import torch

_WORD = torch.int64
"""Messages are moved in words: a byte per thread would take eight times as many threads. Their parts are aligned."""


class SlotReader:
    """Copies a message from its slot.

    Args:
        slots: uint8 [num_slots, slot_bytes], see `raypp.transport.link`; sizes are multiples of 8, as are those of
            messages.
        buffer: uint8 [slot_bytes].
        index: int64 [1], on the same device: the slot of the step that runs.
        is_there: int64 [1], likewise: 1 when it holds a message; 0: zeros are read.
    """

    def __init__(self, slots: torch.Tensor, buffer: torch.Tensor, index: torch.Tensor, is_there: torch.Tensor) -> None:
        self.num_slots = len(slots)
        self._slots = slots.view(_WORD)
        self._buffer = buffer.view(_WORD).unsqueeze(0)
        self._index = index
        self._is_there = is_there

    def read(self, num_bytes: int) -> None:
        """Copy the start of the slot to the start of the buffer."""
        words = num_bytes // _WORD.itemsize
        into = self._buffer[:, :words]
        torch.index_select(self._slots[:, :words], 0, self._index, out=into)
        into.mul_(self._is_there)


class SlotWriter:
    """Copies a message to its slot. Arguments as of `SlotReader`."""

    def __init__(self, slots: torch.Tensor, buffer: torch.Tensor, index: torch.Tensor) -> None:
        self.num_slots = len(slots)
        self._slots = slots.view(_WORD)
        self._buffer = buffer.view(_WORD).unsqueeze(0)
        self._index = index

    def write(self, num_bytes: int) -> None:
        """Copy the start of the buffer to the start of the slot."""
        words = num_bytes // _WORD.itemsize
        self._slots[:, :words].index_copy_(0, self._index, self._buffer[:, :words])

"""Which texts' masks are being made, and since when: memory that the driver shares with the grammar process.

It can be read whatever has become of that process: killed, frozen, or busy with one mask for seconds.
"""

from __future__ import annotations

import mmap
import os
import struct
import time

NUM_PLACES = 16
"""Masks that can be noted at a time; more than the threads that make them."""

_PLACE = struct.Struct("<qq")  # the text's number; when its mask was begun, monotonic ns, 0 if the place is free
_FREE = (0, 0)


def create_board_file() -> int:
    """Return the descriptor of a file in memory for one board; a child process may be given it.

    Raises:
        OSError: there is none to be had.
    """
    file_descriptor = os.memfd_create("grammar board")
    os.ftruncate(file_descriptor, NUM_PLACES * _PLACE.size)
    return file_descriptor


class Board:
    """One process writes, another one reads. In the first, callers see to it that each place has one writer."""

    def __init__(self, file_descriptor: int) -> None:
        """Map the file of `create_board_file`; the descriptor may be closed then.

        Raises:
            OSError: it cannot be mapped.
        """
        self._memory = mmap.mmap(file_descriptor, NUM_PLACES * _PLACE.size)

    def write(self, place: int, number: int, began_ns: int) -> None:
        """Note in a place that a text's mask was begun, monotonic ns."""
        _PLACE.pack_into(self._memory, place * _PLACE.size, number, began_ns)

    def clear(self, place: int) -> None:
        """Note that the mask of a place is made."""
        _PLACE.pack_into(self._memory, place * _PLACE.size, *_FREE)

    def read(self) -> list[tuple[int, float]]:
        """Return the numbers of the texts whose masks are being made, and for how many seconds each has been so far."""
        now_ns = time.monotonic_ns()
        return [
            (number, (now_ns - began_ns) / 1e9) for number, began_ns in _PLACE.iter_unpack(self._memory[:]) if began_ns
        ]

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()

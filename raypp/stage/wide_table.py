"""A table with several entries per row that few requests need: it is there when one does, and as wide as they need."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray

from raypp.ops.host_to_device import to_device


class WideTable:
    """Entries by row: [max_num_seqs, width, ...]. Unused entries repeat the row's last one, or are neutral.

    It appears late, and moves when it grows: a CUDA graph may read it only if it was reserved, and has not moved since.
    """

    def __init__(
        self,
        num_rows: int,
        neutral: int | float,
        dtype: torch.dtype,
        device: torch.device,
        *,
        entry_len: int | None = None,
    ) -> None:
        """Allocate nothing yet.

        Args:
            num_rows: Rows of the stage's tables.
            neutral: What a row without entries holds.
            dtype: Of the values.
            device: Where the table will be.
            entry_len: Values per entry; None for scalars.
        """
        self._num_rows = num_rows
        self._neutral = neutral
        self._dtype = dtype
        self._device = device
        self._trailing = () if entry_len is None else (entry_len,)
        self._table: torch.Tensor | None = None
        self._reserved: torch.Tensor | None = None

    def reserve(self, width: int) -> None:
        """Be there from now on, for at least `width` entries per row."""
        self._reserved = self._at_least(width)

    @property
    def has_moved(self) -> bool:
        """Whether it is elsewhere than it was reserved."""
        return self._table is not self._reserved

    def tensor(self) -> torch.Tensor:
        """Return the table."""
        assert self._table is not None, "no row needs this table"
        return self._table

    @property
    def is_there(self) -> bool:
        """Whether any row ever needed it."""
        return self._table is not None

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the entries of rows, [N, width, ...]. Shapes: rows [N] int64."""
        return self.tensor().index_select(0, rows)

    def clear(self, rows: torch.Tensor) -> None:
        """Make rows neutral. Shapes: rows [S] int64."""
        if self._table is not None:
            self._table.index_fill_(0, rows, self._neutral)

    def set(self, row: int, entries: NDArray[Any]) -> None:
        """Write a row's entries. Shapes: entries [n, ...], n >= 1."""
        table = self._table
        if table is None or table.shape[1] < len(entries):
            table = self._at_least(1 << (len(entries) - 1).bit_length())
        values = to_device(entries, self._device).to(self._dtype)
        table[row, : len(entries)] = values
        table[row, len(entries) :] = values[-1]

    def _at_least(self, width: int) -> torch.Tensor:
        old = self._table
        if old is not None and old.shape[1] >= width:
            return old
        shape = (self._num_rows, width, *self._trailing)
        table = torch.full(shape, self._neutral, dtype=self._dtype, device=self._device)
        if old is not None:
            table[:, : old.shape[1]] = old
            table[:, old.shape[1] :] = old[:, -1:]
        self._table = table
        return table

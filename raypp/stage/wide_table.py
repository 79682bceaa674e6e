"""A table with several entries per row that few requests need: it is there when one does, and as wide as they need."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray

from raypp.ops.host_to_device import to_device


class WideTable:
    """Entries by row: [max_num_seqs, width, ...]. Unused entries repeat the row's last one, or are neutral.

    It appears late, and moves when it grows: no CUDA graph may read it.
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

    @property
    def is_there(self) -> bool:
        """Whether any row ever needed it."""
        return self._table is not None

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the entries of rows, [N, width, ...]. Shapes: rows [N] int64."""
        assert self._table is not None, "no row needs this table"
        return self._table.index_select(0, rows)

    def clear(self, rows: torch.Tensor) -> None:
        """Make rows neutral. Shapes: rows [S] int64."""
        if self._table is not None:
            self._table.index_fill_(0, rows, self._neutral)

    def set(self, row: int, entries: NDArray[Any]) -> None:
        """Write a row's entries. Shapes: entries [n, ...], n >= 1."""
        table = self._at_least(len(entries))
        values = to_device(entries, self._device).to(self._dtype)
        table[row, : len(entries)] = values
        table[row, len(entries) :] = values[-1]

    def _at_least(self, width: int) -> torch.Tensor:
        old = self._table
        if old is not None and old.shape[1] >= width:
            return old
        width = 1 << (width - 1).bit_length()
        shape = (self._num_rows, width, *self._trailing)
        table = torch.full(shape, self._neutral, dtype=self._dtype, device=self._device)
        if old is not None:
            table[:, : old.shape[1]] = old
            table[:, old.shape[1] :] = old[:, -1:]
        self._table = table
        return table

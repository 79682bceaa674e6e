"""Measures the memory of recordings: tensors exactly, graphs themselves as far as can be told.

Graphs and kernels take memory of the driver's, of which only the device's total tells. A device may have other users,
who come and go meanwhile: another stage on the same GPU makes its KV cache.
"""

from __future__ import annotations

from raypp.graphs.pieces import GraphMaker, MemoryUse

_MOST_BYTES = 256 << 20
"""No recording's graphs take as much as that: somebody else did."""
_NONE = MemoryUse(0, 0)


class MemoryMeter:
    """Measures the recordings of one mode.

    Args:
        maker: Of the graphs; None: nothing takes any.
    """

    def __init__(self, maker: GraphMaker | None) -> None:
        self._maker = maker
        self._first = self._last = self._read()
        self._graph_bytes: list[int] = []
        self._num_disturbed = 0

    def begin(self) -> None:
        """Note that a recording begins."""
        self._last = self._read()

    def end(self) -> int:
        """Note that it has ended; return the bytes of all so far."""
        before, self._last = self._last, self._read()
        graph_bytes = self._last.other_bytes - before.other_bytes
        if 0 <= graph_bytes < _MOST_BYTES:
            self._graph_bytes.append(graph_bytes)
        else:
            self._num_disturbed += 1
        return self.total_bytes

    def trim(self) -> int:
        """Give back what is kept for nothing; return the bytes of all."""
        if self._maker is not None:
            self._maker.trim()
        self._last = self._read()
        return self.total_bytes

    @property
    def graph_bytes(self) -> int:
        """Bytes of the graphs themselves; one that was disturbed counts as the average of the others."""
        average = sum(self._graph_bytes) / max(1, len(self._graph_bytes))
        return sum(self._graph_bytes) + round(average * self._num_disturbed)

    @property
    def total_bytes(self) -> int:
        """Bytes of all recordings so far."""
        return max(0, self._last.own_bytes - self._first.own_bytes) + self.graph_bytes

    def _read(self) -> MemoryUse:
        return _NONE if self._maker is None else self._maker.memory()

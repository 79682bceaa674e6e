"""How much memory recordings take: tensors exactly, graphs themselves by the usual one.

Graphs and kernels take memory of the driver's, of which only the device's total tells; and a device may have other
users, who come and go meanwhile. So each recording's share is looked at, and the median of them counts.
"""

from __future__ import annotations

import statistics

from raypp.graphs.pieces import GraphMaker, MemoryUse

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

    def begin(self) -> None:
        """Note that a recording begins."""
        self._last = self._read()

    def end(self) -> int:
        """Note that it has ended; return the bytes of all so far."""
        before, self._last = self._last, self._read()
        self._graph_bytes.append(max(0, self._last.other_bytes - before.other_bytes))
        return self.total_bytes

    def trim(self) -> int:
        """Give back what is kept for nothing; return the bytes of all."""
        if self._maker is not None:
            self._maker.trim()
        self._last = self._read()
        return self.total_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all recordings so far."""
        own_bytes = max(0, self._last.own_bytes - self._first.own_bytes)
        usual_bytes = statistics.median(self._graph_bytes) if self._graph_bytes else 0
        return own_bytes + round(usual_bytes * len(self._graph_bytes))

    def _read(self) -> MemoryUse:
        return _NONE if self._maker is None else self._maker.memory()

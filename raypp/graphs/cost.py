"""Modes of graphs, and the time and memory that they took: plain data, also for processes that know no device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GraphMode = Literal["full", "piecewise"]
"""`full`: a decode step never waits for the device, and is one graph. `piecewise`: what is between break points never
does, and is one."""
GRAPH_MODES: tuple[GraphMode, ...] = ("full", "piecewise")


@dataclass
class GraphCost:
    """What recording the graphs of a mode took."""

    num_graphs: int = 0
    seconds: float = 0.0
    memory_bytes: int = 0
    num_left_out: int = 0
    """Sizes for which memory did not suffice."""

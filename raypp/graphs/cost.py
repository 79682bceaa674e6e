"""The time and memory that recording took: plain data, also for processes that know nothing of devices."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class GraphCost:
    """What recording the graphs of a mode took."""

    num_graphs: int = 0
    seconds: float = 0.0
    memory_bytes: int = 0
    num_left_out: int = 0
    """Sizes for which memory did not suffice."""

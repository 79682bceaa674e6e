"""Counters of an encoder since its start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class EncoderStats:
    """Counters of encoded batches, and what their graphs cost."""

    num_items: int = 0
    """Encoded, not found in a cache."""
    num_tokens: int = 0
    """Of these items."""
    num_captured_batches: int = 0
    num_captured_items: int = 0
    num_captured_tokens: int = 0
    """Without padding."""
    num_padding_tokens: int = 0
    num_eager_batches: int = 0
    """Encoded without a graph: an item larger than every budget, or a batch whose padding costs more than launching."""
    num_oversize_items: int = 0
    """Items that are larger than every budget."""
    num_graphs: int = 0
    capture_s: float = 0.0
    graph_bytes: int = 0
    """What capturing took of the device's memory, and the buffers of the batches."""

    @property
    def hit_rate(self) -> float:
        """The share of items that were encoded by a captured batch, 0..1."""
        return self.num_captured_items / max(self.num_items, 1)

    @property
    def padding_share(self) -> float:
        """The share of the captured batches' tokens that were padding, 0..1."""
        return self.num_padding_tokens / max(self.num_captured_tokens + self.num_padding_tokens, 1)

"""What draws of truncated rows keep on a GPU. Known to the plan, so without torch."""

from __future__ import annotations

ROOM = 4096
"""The most tokens of a row that a GPU draws from without reading the whole row again."""
MAX_NUM_BLOCKS = 2048
"""The most blocks of the vocabulary whose highest logits a GPU keeps."""


def draw_bytes(max_rows: int, vocab_size: int) -> int:
    """Return the bytes of draws of so many rows."""
    return max_rows * (8 * min(ROOM, vocab_size) + 4 * MAX_NUM_BLOCKS)

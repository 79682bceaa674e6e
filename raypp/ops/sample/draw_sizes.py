"""Sizes of the buffers that a GPU keeps for the choice of tokens. The plan asks for them, so this imports no torch."""

from __future__ import annotations

ROOM = 4096
"""The most tokens of a row that a GPU draws from without reading the whole row again."""
MAX_NUM_BLOCKS = 2048
"""The most blocks of the vocabulary whose highest logits a GPU keeps."""
MAX_CHANGED_POSITIONS = 512
"""The most positions whose logits are changed at a time; a larger step's are changed and drawn in pieces."""
MAX_SCORED = 128
"""Prompt tokens whose log-probabilities are computed at a time: their logits of 152,000 tokens take 78 MB."""

MAX_REPORTED = 20
"""The most likely tokens whose log-probabilities a full graph reports; of more, torch reports."""


def draw_bytes(max_positions: int, vocab_size: int) -> int:
    """Return the bytes of draws at so many positions, and of their changed logits."""
    changed = min(max_positions, MAX_CHANGED_POSITIONS) * vocab_size * 4
    return changed + max_positions * (8 * min(ROOM, vocab_size) + 4 * MAX_NUM_BLOCKS)

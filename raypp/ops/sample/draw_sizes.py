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

DIGIT_BITS = 9
NUM_DIGITS = 3
"""Of the distance up to which tokens stay, see `raypp.ops.sample.truncation`."""
_BYTES_OF_DIGIT = 8 << DIGIT_BITS


def draw_bytes(max_positions: int, vocab_size: int, num_members: int = 1) -> int:
    """Return the bytes that are kept for draws at so many positions and for their changed logits, on one member."""
    num_logits = -(-vocab_size // num_members)
    changed = min(max_positions, MAX_CHANGED_POSITIONS) * num_logits * 4
    room = 8 * min(ROOM, vocab_size) if num_members == 1 else 0
    return changed + max_positions * (room + 4 * MAX_NUM_BLOCKS)


def digit_bytes(num_members: int) -> int:
    """Return the bytes of a position's counts and weights by digits, while members draw; 0 of one.

    A member has its own ones twice, in turns, and those of all three times: the first, the last, and what comes.
    """
    return (2 + 3 * num_members) * 2 * _BYTES_OF_DIGIT if num_members > 1 else 0


def exchanged_bytes(num_members: int) -> int:
    """Return what a member gets from the others for a draw: counts for top-k, and weights for this and for top-p."""
    return (num_members - 1) * (NUM_DIGITS + NUM_DIGITS + NUM_DIGITS - 1) * _BYTES_OF_DIGIT

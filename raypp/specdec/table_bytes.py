"""What the last stage's table of tokens costs. By itself: the driver plans with it, and has no use for torch."""

from __future__ import annotations

TOKEN_BYTES = 4


def token_table_bytes(num_rows: int, window: int) -> int:
    """Return what a `TokenTable` of so many rows and columns costs, bytes."""
    return num_rows * window * TOKEN_BYTES

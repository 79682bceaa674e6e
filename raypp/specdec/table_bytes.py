"""How wide the last stage's table of tokens is, and what it costs. Without torch: the driver plans with it."""

from __future__ import annotations

from raypp.sampling_params import MAX_BAD_WORD_TOKENS

TOKEN_BYTES = 4
_MULTIPLE = 16  # tokens, so that a GPU reads every row of the table 16 bytes at a time


def row_tokens_width(window: int, max_drafts: int) -> int:
    """Return the columns of `raypp.ops.row_tokens.RowTokens`.

    Args:
        window: The newest tokens that n-grams are looked for in; 0 without speculation.
        max_drafts: K: so many tokens, and the one after them, lie in front of those that are read.
    """
    needed = max(window, MAX_BAD_WORD_TOKENS + max_drafts) + max_drafts + 1
    return -(-needed // _MULTIPLE) * _MULTIPLE


def widest_window(num_rows: int, max_bytes: int, max_drafts: int) -> int:
    """Return the widest window whose table of so many rows takes at most so many bytes; 0 or less: none does."""
    return max_bytes // token_table_bytes(num_rows, _MULTIPLE) * _MULTIPLE - max_drafts - 1


def token_table_bytes(num_rows: int, width: int) -> int:
    """Return what a table of so many rows and columns costs, bytes."""
    return num_rows * width * TOKEN_BYTES

"""How large the sampler's tables by row are: known to the plan, so without torch."""

from __future__ import annotations

from raypp.request_limits import (
    MAX_BAD_WORD_SPELLINGS,
    MAX_BAD_WORD_TOKENS,
    MAX_BIASED_TOKENS,
    MAX_END_TOKENS,
)

_BYTES_PER_ROW = 4 * MAX_END_TOKENS + (4 + 4) * MAX_BIASED_TOKENS + 4 * MAX_BAD_WORD_SPELLINGS * MAX_BAD_WORD_TOKENS
_BITS_PER_TOKEN = 32 + 8 + 1  # how often it was generated; whether it is in the prompt; whether it is allowed


def sampler_table_bytes(num_rows: int, vocab_size: int) -> int:
    """Return the bytes of all of them."""
    return num_rows * (_BYTES_PER_ROW + vocab_size * _BITS_PER_TOKEN // 8)

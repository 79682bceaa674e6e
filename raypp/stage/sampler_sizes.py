"""How large the sampler's recordings may be, and the tables for rare parameters that they read: known to the plan.

A request with more entries than these makes its table wider, and so moves it; see `raypp.stage.wide_table`.
"""

from __future__ import annotations

from raypp.request_limits import MAX_BAD_WORD_TOKENS

END_TOKENS = 16
BIASED_TOKENS = 512
BAD_WORDS = 32

_BYTES_PER_ROW = 8 * END_TOKENS + (8 + 4) * BIASED_TOKENS + 4 * BAD_WORDS * MAX_BAD_WORD_TOKENS
_BITS_PER_TOKEN = 32 + 8 + 1  # how often it was generated; whether it is in the prompt; whether it is allowed

_MAX_COPIED_LOGITS = 1 << 23


def may_copy(num_positions: int, vocab_size: int) -> bool:
    """Return whether recordings for so many positions may make copies of their logits.

    Changes are made to a copy, which a recording keeps for ever.
    """
    return num_positions * vocab_size <= _MAX_COPIED_LOGITS


def sampler_table_bytes(num_rows: int, vocab_size: int) -> int:
    """Return the bytes of all of them."""
    return num_rows * (_BYTES_PER_ROW + vocab_size * _BITS_PER_TOKEN // 8)

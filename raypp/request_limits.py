"""What one request may bring at most: the one place that says so. Checked by the client, before anything is queued.

What the engine keeps of rare parameters lies in tables as wide as the widest request, for as long as the engine runs;
and stop strings are looked for in every new piece of text. Limits that the model sets, its vocabulary and its context,
are in `raypp.api.check_params` and `raypp.api.prepare`.
"""

from __future__ import annotations

MAX_CONTINUATIONS = 16_384
MAX_BIASED_TOKENS = 1_024
MAX_END_TOKENS = 64
"""Stop tokens and the model's end-of-sequence tokens together."""
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 1_024
MAX_CACHE_SALT_CHARS = 1_024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 1_024
MAX_BAD_WORD_SPELLINGS = 256
"""Most words have two: at the beginning of a text and after a space."""
MAX_BAD_WORD_TOKENS = 64
"""Tokens of one spelling: the last stage remembers that many."""

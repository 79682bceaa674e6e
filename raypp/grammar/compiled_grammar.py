"""A compiled grammar, and what follows one text through it, by llguidance."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from raypp.grammar.lark import LARK_MARK, reason_of
from raypp.grammar.vocabulary import Vocabulary
from raypp.messages import Int32s

_MAX_LEXER_STATES = 50_000  # of 1 to 2 KiB, per text
_MAX_ITEMS_IN_ROW = 4_000  # ways to go on with a text: four for each optional name of an open object
# What a grammar takes: 660 real schemas 100 bytes per character, the worst 500.
_BYTES_PER_CHAR = 500
_LEAST_BYTES = 1 << 18


class CompiledGrammarError(Exception):
    """A grammar cannot be made, with the reason."""


class CompiledGrammar:
    """What texts are followed by. May be used from any thread."""

    def __init__(self, lark: str, vocabulary: Vocabulary) -> None:
        """Compile a grammar, and make its first mask. Holds the GIL for some milliseconds at most.

        Args:
            lark: The grammar, as `compile.grammar_of` returns it.
            vocabulary: The model's.

        Raises:
            CompiledGrammarError: it cannot be compiled.
        """
        from llguidance import LLMatcher, LLParserLimits

        self.vocabulary = vocabulary
        self.memory_size_bytes = _LEAST_BYTES + _BYTES_PER_CHAR * len(lark)
        """What it takes, about."""
        limits = LLParserLimits(
            max_lexer_states=_MAX_LEXER_STATES, max_items_in_row=_MAX_ITEMS_IN_ROW, verbose_errors=False
        )
        # Where there is one way to go on, it would allow the tokens alone that a tokenizer makes of it.
        grammar = LLMatcher.grammar_from_lark(f'{lark}\n{LARK_MARK} {{"no_forcing": true}}')
        self._prototype = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=limits)
        _check(self._prototype)
        begun = self._prototype.deep_copy()
        begun.compute_bitmask()
        if not _is_at_a_loss(begun):  # else the first text says so
            _check(begun)
            self._prototype = begun  # what was found out for the first mask is known to all texts

    def matcher(self) -> Matcher:
        """Return what follows a new text."""
        return Matcher(self._prototype.deep_copy(), self.vocabulary.stop_token_ids)


@dataclass(slots=True)
class Matcher:
    """Follows one text, for one thread at a time. llguidance says nothing of its errors unless it is asked."""

    _matcher: Any
    _stop_token_ids: frozenset[int]
    _is_terminated: bool = field(default=False, init=False)

    def fill_next_token_bitmask(self, rows: Int32s, index: int) -> None:
        """Write what may come next into a row of words, [N, W]; nothing if nothing may.

        Raises:
            RuntimeError: it cannot be computed.
        """
        row = rows[index]
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if _is_at_a_loss(self._matcher):
            row.fill(0)
        else:
            self._check()

    def accept_token(self, token_id: int) -> bool:
        """Go on by a token, an end token too; return False if it may not come.

        Raises:
            RuntimeError: it cannot be computed.
        """
        if self._is_terminated:
            return False
        if token_id in self._stop_token_ids:
            self._is_terminated = bool(self._matcher.is_accepting())
            return self._is_terminated
        is_taken: bool = self._matcher.try_consume_tokens([token_id]) == 1
        self._check()
        return is_taken

    def is_terminated(self) -> bool:
        """Return whether an end token was taken."""
        return self._is_terminated

    def rollback(self, num_tokens: int) -> None:
        """Take the last tokens back."""
        num_tokens -= self._is_terminated
        self._is_terminated = False
        if num_tokens:
            self._matcher.rollback(num_tokens)
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error() or self._matcher.stop_reason() not in ("NotStopped", "NoExtension"):
            raise RuntimeError(self._matcher.get_error() or self._matcher.stop_reason())


def _is_at_a_loss(matcher: Any) -> bool:
    """Return whether a matcher found no token that may come next."""
    return bool(matcher.is_error() and matcher.get_error().startswith("NoExtensionBias"))


def _check(matcher: Any) -> None:
    if matcher.is_error():
        raise CompiledGrammarError(reason_of(matcher.get_error()))

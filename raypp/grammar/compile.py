"""From a constraint to a grammar in llguidance's form of Lark, and to a compiled one."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from raypp.errors import RequestError, page
from raypp.grammar.lark import LARK_MARK, json_rule, lark_of_grammar, literal, one_of, reason_of, regex
from raypp.grammar.structural_tag import lark_of_structural_tag
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
    is_terminated: bool = field(default=False, init=False)
    """Whether an end token was taken."""

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
        if self.is_terminated:
            return False
        if token_id in self._stop_token_ids:
            self.is_terminated = bool(self._matcher.is_accepting())
            return self.is_terminated
        is_taken: bool = self._matcher.try_consume_tokens([token_id]) == 1
        self._check()
        return is_taken

    def rollback(self, num_tokens: int) -> None:
        """Take the last tokens back."""
        num_tokens -= self.is_terminated
        self.is_terminated = False
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


_OBJECT = {"type": "object", "additionalProperties": True}


def compile_constraint(source: str, vocabulary: Vocabulary) -> CompiledGrammar:
    """Return the grammar of a constraint, ready to be followed.

    Args:
        source: `structured_outputs.source_of`.
        vocabulary: The model's.

    Raises:
        RequestError: why it cannot be.
    """
    try:
        return CompiledGrammar(grammar_of(source), vocabulary)
    except CompiledGrammarError as error:
        raise refused(kind_and_value(source)[0], str(error)) from error


def grammar_of(source: str) -> str:
    """Return the grammar of a constraint in llguidance's form of Lark.

    JSON is written in one line as Python's json.dumps does: where a grammar allows white space, a model may write
    nothing else for ever.

    Args:
        source: `structured_outputs.source_of`.

    Raises:
        RequestError: a part that could not be enforced.
    """
    kind, value = kind_and_value(source)
    try:
        grammar = _lark(kind, value)
        if half := re.search("[\ud800-\udfff]", grammar):
            raise ValueError(f"the character \\u{ord(half[0]):x}, which is half of one")
        return grammar
    except RecursionError:
        raise refused(kind, "it is nested too deeply") from None
    except (ValueError, OverflowError) as error:  # the latter of the number of a character
        raise refused(kind, str(error)) from None


def _lark(kind: str, value: Any) -> str:
    match kind:
        case "json_schema":
            start = f"start: {json_rule(json.loads(value))}"
        case "json_object":
            start = f"start: {json_rule(_OBJECT)}"
        case "regex":
            start = f"start: {regex(value)}"
        case "choice":
            start = f"start: TEXT\nTEXT: {one_of(map(literal, value))}"
        case "grammar":
            start = lark_of_grammar(value)
        case _:
            start = lark_of_structural_tag(json.loads(value))
    # Without one more line in front of a user's Lark: errors say in which of its lines they are.
    return f"{start}\n" if start.lstrip().startswith(LARK_MARK) else f"{LARK_MARK} {{}}\n{start}\n"


def kind_and_value(source: str) -> tuple[str, Any]:
    """Return what a constraint is and what it says."""
    [(kind, value)] = json.loads(source).items()
    return kind, value


def refused(kind: str, reason: str) -> RequestError:
    """Return the error of a constraint that cannot be compiled."""
    return RequestError(
        f"structured_outputs: this {kind} cannot be compiled",
        got=reason[:300],
        expected="one that a grammar can follow",
        hint=f"{page('structured_outputs')} says what is supported",
        param="structured_outputs",
    )

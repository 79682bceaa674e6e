"""A compiled grammar, whichever of the two compilers made it: xgrammar, or llguidance for schemas beyond xgrammar.

The methods of a matcher have the names and the meaning of xgrammar's own, which is one.
"""

from __future__ import annotations

import json
import resource
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from raypp.grammar.vocabulary import Vocabulary
from raypp.messages import Int32s

_XGRAMMAR, _LLGUIDANCE = b"x", b"l"
_JSON_FORM = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": False,
    "lenient": False,
    # Without "u": a name that is taken could be written once more with escapes, for any value.
    "json_allowed_escapes": 'nrbtf\\"',
}
_MAX_LEXER_STATES = 50_000  # of 1 to 2 KiB, per text
_MAX_COMPILE_S = 3.0  # the grammar process does it once more, unguarded
_MAX_MEMORY_BYTES = 256 << 20


class CompiledGrammarError(Exception):
    """A grammar cannot be made, with the reason."""


class Matcher(Protocol):
    """Follows one text, for one thread at a time."""

    def fill_next_token_bitmask(self, rows: Int32s, index: int) -> Any:
        """Write what may come next into a row of words, [N, W]; nothing if all may.

        Raises:
            RuntimeError: it cannot be computed.
        """

    def accept_token(self, token_id: int) -> bool:
        """Go on by a token, an end token too; return False if it may not come."""

    def is_terminated(self) -> bool:
        """Return whether an end token was taken."""

    def rollback(self, num_tokens: int) -> None:
        """Take the last tokens back."""


class CompiledGrammar(Protocol):
    """What texts are followed by."""

    @property
    def memory_size_bytes(self) -> int:
        """What it takes, about."""

    def matcher(self) -> Matcher:
        """Return what follows a new text. From any thread."""

    def written(self) -> bytes:
        """Return what `read_grammar` makes the grammar of."""


@dataclass(frozen=True)
class XgrammarGrammar:
    """Made by xgrammar."""

    compiled: Any  # its `CompiledGrammar`

    @property
    def memory_size_bytes(self) -> int:
        """What it takes."""
        size: int = self.compiled.memory_size_bytes
        return size

    def matcher(self) -> Matcher:
        """Return what follows a new text."""
        import xgrammar

        made: Matcher = xgrammar.GrammarMatcher(self.compiled)
        return made

    def written(self) -> bytes:
        """Return what `read_grammar` takes."""
        text: str = self.compiled.serialize_json()
        return _XGRAMMAR + text.encode()


LARK_MARK = "%llguidance"
"""With it begins a grammar in llguidance's form of Lark."""


def lark_of_schema(schema: Any) -> str:
    """Return the grammar of a schema, as `schema_writer.rewritten` returns it."""
    written = json.dumps({**({} if schema is True else schema), "x-guidance": _JSON_FORM})
    return f"{LARK_MARK} {{}}\nstart: %json {written}"


class LlguidanceGrammar:
    """Made by llguidance: of a schema that it follows to the letter, see `raypp.grammar.schema_writer`, or of Lark."""

    def __init__(self, lark: str, vocabulary: Vocabulary, memory_size_bytes: int | None = None) -> None:
        """Compile a grammar.

        Args:
            lark: The grammar, which begins with `LARK_MARK`.
            vocabulary: The model's.
            memory_size_bytes: What it is known to take; None: find out, and make the first mask as a trial.

        Raises:
            CompiledGrammarError: it cannot be compiled, or only with more time or memory than it may take.
        """
        from llguidance import LLMatcher, LLParserLimits

        self._lark = lark
        self._stop_token_ids = frozenset(vocabulary.text.stop_token_ids)
        tokenizer = vocabulary.llguidance
        limits = LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
        before_bytes, began_s = _resident_bytes(), time.monotonic()
        # Where there is one way to go on, it would allow the tokens alone that a tokenizer makes of it.
        grammar = LLMatcher.grammar_from_lark(f'{lark}\n{LARK_MARK} {{"no_forcing": true}}')
        self._prototype = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if memory_size_bytes is None:
            _check(self._prototype)
            self._prototype.deep_copy().compute_bitmask()
            memory_size_bytes = max(_resident_bytes() - before_bytes, 1 << 20)
            if memory_size_bytes > _MAX_MEMORY_BYTES:
                raise CompiledGrammarError(f"compiling it takes more than {_MAX_MEMORY_BYTES >> 20} MiB")
            if time.monotonic() - began_s > _MAX_COMPILE_S:
                raise CompiledGrammarError(f"compiling it takes longer than {_MAX_COMPILE_S:g} s")
        _check(self._prototype)
        self.memory_size_bytes = memory_size_bytes
        """What it takes, about."""

    def matcher(self) -> Matcher:
        """Return what follows a new text."""
        return LlguidanceMatcher(self._prototype.deep_copy(), self._stop_token_ids)

    def written(self) -> bytes:
        """Return what `read_grammar` takes."""
        return _LLGUIDANCE + json.dumps([self._lark, self.memory_size_bytes]).encode()


@dataclass(slots=True)
class LlguidanceMatcher:
    """Follows one text by llguidance's `LLMatcher`, which says nothing of its errors unless it is asked."""

    _matcher: Any
    _stop_token_ids: frozenset[int]
    _is_terminated: bool = field(default=False, init=False)

    def fill_next_token_bitmask(self, rows: Int32s, index: int) -> None:
        """Write what may come next into a row of words.

        Raises:
            RuntimeError: it cannot be computed.
        """
        row = rows[index]
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self._check()

    def accept_token(self, token_id: int) -> bool:
        """Go on by a token; return False if it may not come."""
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


def read_grammar(data: bytes, info: Any, vocabulary: Vocabulary) -> CompiledGrammar:
    """Return the grammar that `written` returned. Takes some of a second with a large one. From any thread.

    Args:
        data: What was written.
        info: xgrammar's `TokenizerInfo` that the grammar was made for.
        vocabulary: The model's.
    """
    if data[:1] == _LLGUIDANCE:
        lark, memory_size_bytes = json.loads(data[1:])
        return LlguidanceGrammar(lark, vocabulary, memory_size_bytes)
    import xgrammar

    return XgrammarGrammar(xgrammar.CompiledGrammar.deserialize_json(data[1:].decode(), info))


def _check(matcher: Any) -> None:
    if matcher.is_error():
        said = matcher.get_error().partition("\n")[0]
        raise CompiledGrammarError(said.partition("failed to compile JSON schema: ")[2] or said)


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

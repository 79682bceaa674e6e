"""All texts under grammars: who is followed, and what is compiled already."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from raypp.errors import RayppError
from raypp.grammar.board import Board
from raypp.grammar.compile import kind_and_value
from raypp.grammar.compiled_grammar import CompiledGrammar, read_grammar
from raypp.grammar.grammar_messages import (
    NO_TOKENS_YET,
    CloseGrammar,
    Compiled,
    CompileGrammar,
    GrammarAdvance,
    GrammarOrder,
    GrammarReply,
    NotCompiled,
    OpenGrammar,
    Unknown,
    key_of,
)
from raypp.grammar.mask_makers import MaskMakers
from raypp.grammar.text_grammar import TextGrammar
from raypp.grammar.vocabulary import Vocabulary

_MAX_CACHE_BYTES = 512 << 20


class Texts:
    """Follows texts. Orders come from one thread at a time, replies leave from several."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        vocab_size: int,
        compile_source: Callable[[str], None],
        reply: Callable[[GrammarReply], None],
        board: Board | None = None,
        *,
        threads: bool = True,
    ) -> None:
        """Follow nothing yet.

        Args:
            vocabulary: The model's.
            vocab_size: V.
            compile_source: Has a constraint compiled; `take_compiled` is called once it is.
            reply: Takes what there is to say. From several threads.
            board: See `MaskMakers`.
            threads: Likewise.
        """
        self.makers = MaskMakers(vocab_size, reply, board, threads=threads)
        """To be told to make the masks that are due after `handle` and `take_compiled`."""
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._compile_source = compile_source
        self._reply = reply
        self._texts: dict[int, TextGrammar] = {}
        self._compiled: OrderedDict[str, CompiledGrammar] = OrderedDict()  # by key, the last used ones last
        self._num_cached_bytes = 0
        self._compiling: set[str] = set()

    def handle(self, order: GrammarOrder) -> None:
        """Do what the driver says."""
        match order:
            case CompileGrammar(source):
                key = key_of(source)
                if key in self._compiled:
                    self._compiled.move_to_end(key)
                    self._reply(Compiled(key))
                elif key not in self._compiling:
                    self._compiling.add(key)
                    self._compile_source(source)
            case OpenGrammar():
                self._open(order)
            case GrammarAdvance():
                self._advance(order)
            case CloseGrammar(number):
                if (text := self._texts.pop(number, None)) is not None:
                    text.is_closed = True

    def deserialize(self, source: str, data: bytes) -> CompiledGrammar:
        """Return the grammar that a compiler wrote. Takes some of a second with a large one. From any thread."""
        return read_grammar(data, self._vocabulary.of(*kind_and_value(source)), self._vocabulary)

    def take_compiled(self, source: str, result: CompiledGrammar | RayppError) -> None:
        """Keep a compiled constraint, or say why there is none. From the thread of `handle`."""
        key = key_of(source)
        self._compiling.discard(key)
        if isinstance(result, RayppError):
            self._reply(NotCompiled(key, result))
            return
        self._compiled[key] = result
        self._num_cached_bytes += result.memory_size_bytes
        while self._num_cached_bytes > _MAX_CACHE_BYTES and len(self._compiled) > 1:
            _, oldest = self._compiled.popitem(last=False)
            self._num_cached_bytes -= oldest.memory_size_bytes
        self._reply(Compiled(key))

    def _open(self, order: OpenGrammar) -> None:
        compiled = self._compiled.get(order.key)
        if compiled is None:
            self._reply(Unknown(order.number))
            return
        self._compiled.move_to_end(order.key)
        text = TextGrammar(order.number, compiled, self._vocab_size, order.allowed_token_ids)
        self._texts[order.number] = text
        self.makers.put(text, (NO_TOKENS_YET, order.token_ids or [], []))

    def _advance(self, advance: GrammarAdvance) -> None:
        token_ids, draft_ids = advance.token_ids.tolist(), advance.draft_ids.tolist()
        first_token = first_draft = 0
        for number, num_tokens, num_drafts in advance.entries.tolist():
            end_token, end_draft = first_token + num_tokens, first_draft + num_drafts
            if (text := self._texts.get(number)) is not None:
                new, drafts = token_ids[first_token:end_token], draft_ids[first_draft:end_draft]
                self.makers.put(text, (advance.step_id, new, drafts))
            first_token, first_draft = end_token, end_draft

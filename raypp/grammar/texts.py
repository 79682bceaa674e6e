"""All texts under grammars: who is followed, what is compiled already, and the threads that make the masks.

A mask mostly takes some microseconds: less than handing it to a thread. So masks are made by the thread that takes the
orders, but those of a text whose last ones took long, by others: xgrammar computes without the GIL. Grammars that get
slow get so token by token, and are noticed long before a mask takes a second.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from raypp.errors import RayppError, RequestError
from raypp.grammar.compile import kind_and_value
from raypp.grammar.messages import (
    NO_TOKENS_YET,
    CloseGrammar,
    GrammarAdvance,
    GrammarMasks,
    GrammarOrder,
    GrammarReply,
    OpenGrammar,
    Refused,
)
from raypp.grammar.text_grammar import Advance, NextMasks, TextGrammar
from raypp.grammar.vocabulary import Vocabulary

_SLOW_S = 0.005
_MAX_CACHE_BYTES = 512 << 20

Made = tuple[int, int, NextMasks]
"""The text's number, the newest step that it has heard of, and its masks."""


class Texts:
    """Follows texts; orders come from one thread, replies leave from several."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        vocab_size: int,
        compile_source: Callable[[str], None],
        reply: Callable[[GrammarReply], None],
        *,
        threads: bool = True,
    ) -> None:
        """Follow nothing yet.

        Args:
            vocabulary: The model's.
            vocab_size: V.
            compile_source: Has a constraint compiled; `take_compiled` is called once it is, in whatever thread.
            reply: Takes what there is to say. From several threads.
            threads: Whether slow masks are made by threads; else all are made within `handle`.
        """
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._compile_source = compile_source
        self._reply = reply
        self._texts: dict[int, TextGrammar] = {}
        self._compiled: OrderedDict[str, Any] = OrderedDict()  # the last used ones last
        self._num_cached_bytes = 0
        self._opening: defaultdict[str, list[OpenGrammar]] = defaultdict(list)
        num_threads = max(2, min(4, (os.cpu_count() or 1) // 2))
        self._slow = ThreadPoolExecutor(num_threads, "masks") if threads else None

    def handle(self, order: GrammarOrder) -> None:
        """Do what the driver says."""
        match order:
            case OpenGrammar(number, source):
                if source in self._compiled:
                    self._compiled.move_to_end(source)
                    self._begin(order, self._compiled[source])
                    return
                self._opening[source].append(order)
                if len(self._opening[source]) == 1:
                    self._compile_source(source)
            case GrammarAdvance():
                self._advance(order)
            case CloseGrammar(number):
                self._texts.pop(number, None)
                for opening in self._opening.values():
                    opening[:] = [o for o in opening if o.number != number]

    def deserialize(self, source: str, data: bytes) -> Any:
        """Return the grammar that a compiler wrote. Takes some of a second with a large one."""
        import xgrammar

        vocabulary = self._vocabulary.of_kind(kind_and_value(source)[0])
        return xgrammar.CompiledGrammar.deserialize_json(data.decode(), vocabulary)

    def take_compiled(self, source: str, result: Any | RayppError) -> None:
        """Begin the texts that waited for a constraint, or refuse them. From the thread of `handle`."""
        orders = self._opening.pop(source, [])
        if isinstance(result, RayppError):
            for order in orders:
                self._reply(Refused(order.number, result))
            return
        self._compiled[source] = result
        self._num_cached_bytes += result.memory_size_bytes
        while self._num_cached_bytes > _MAX_CACHE_BYTES and len(self._compiled) > 1:
            _, oldest = self._compiled.popitem(last=False)
            self._num_cached_bytes -= oldest.memory_size_bytes
        for order in orders:
            self._begin(order, result)

    def close(self) -> None:
        """End the threads."""
        if self._slow is not None:
            self._slow.shutdown(wait=False, cancel_futures=True)

    def _begin(self, order: OpenGrammar, compiled: Any) -> None:
        text = TextGrammar(compiled, self._vocab_size, order.allowed_token_ids)
        self._texts[order.number] = text
        text.waiting.append(Advance(NO_TOKENS_YET, order.token_ids or [], []))
        self._run([(order.number, text)])

    def _advance(self, advance: GrammarAdvance) -> None:
        token_ids, draft_ids = advance.token_ids.tolist(), advance.draft_ids.tolist()
        first_token = first_draft = 0
        due: list[tuple[int, TextGrammar]] = []
        columns = (advance.numbers.tolist(), advance.num_tokens.tolist(), advance.num_drafts.tolist())
        for number, num_tokens, num_drafts in zip(*columns, strict=True):
            new, drafts = token_ids[first_token:][:num_tokens], draft_ids[first_draft:][:num_drafts]
            first_token, first_draft = first_token + num_tokens, first_draft + num_drafts
            if (text := self._texts.get(number)) is not None:
                text.waiting.append(Advance(advance.step_id, new, drafts))
                due.append((number, text))
        self._run(due)

    def _run(self, due: Sequence[tuple[int, TextGrammar]]) -> None:
        quick = [entry for entry in due if not entry[1].is_slow] if self._slow is not None else due
        if quick:
            self._make(quick)
        if self._slow is not None and len(quick) < len(due):
            for entry in due:
                if entry[1].is_slow:
                    self._slow.submit(self._make, [entry])

    def _make(self, due: Sequence[tuple[int, TextGrammar]]) -> None:
        """Make masks and send them."""
        made: list[Made] = []
        for number, text in due:
            try:
                with text.lock:  # of two threads with the same text the first does all, in order
                    if (newest := _catch_up(text)) is not None:
                        made.append((number, newest[0], newest[1]))
            except RayppError as error:
                self._reply(Refused(number, error))
            except Exception as error:  # xgrammar's own: this text ends, the others go on
                self._reply(Refused(number, RequestError("a grammar cannot be followed", got=str(error)[:300])))
        if made:
            self._reply(_masks_of(made))


def _catch_up(text: TextGrammar) -> tuple[int, NextMasks] | None:
    """Go on by all that has come; return the masks behind it, None when another thread did."""
    began_s, newest = time.perf_counter(), None
    while text.waiting:
        newest = text.waiting.popleft()
        text.accept(newest.token_ids)
    if newest is None:
        return None
    masks = text.next_masks(newest.draft_ids)
    text.is_slow = time.perf_counter() - began_s > _SLOW_S
    return newest.step_id, masks


def _masks_of(made: Sequence[Made]) -> GrammarMasks:
    masks = [of_text for _, _, of_text in made]
    return GrammarMasks(
        numbers=np.array([number for number, _, _ in made], np.int64),
        after_steps=np.array([step_id for _, step_id, _ in made], np.int64),
        num_accepted=np.array([of_text.num_accepted for of_text in masks], np.int32),
        num_masks=np.array([len(of_text.bitmasks) for of_text in masks], np.int32),
        draft_ids=np.array([draft_id for of_text in masks for draft_id in of_text.draft_ids], np.int32),
        bitmasks=np.concatenate([of_text.bitmasks for of_text in masks]),
    )

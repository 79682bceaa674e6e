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
from raypp.grammar.text_grammar import MaskRows, TextGrammar
from raypp.grammar.vocabulary import Vocabulary

_SLOW_S = 0.005
_MAX_CACHE_BYTES = 512 << 20


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
                is_new = source not in self._opening  # else it is being compiled, if only for texts that were closed
                self._opening[source].append(order)
                if is_new:
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
        text.waiting.append((NO_TOKENS_YET, order.token_ids or [], []))
        self._run([(order.number, text)])

    def _advance(self, advance: GrammarAdvance) -> None:
        token_ids, draft_ids = advance.token_ids.tolist(), advance.draft_ids.tolist()
        first_token = first_draft = 0
        due: list[tuple[int, TextGrammar]] = []
        for number, num_tokens, num_drafts in advance.entries.tolist():
            new, drafts = token_ids[first_token:][:num_tokens], draft_ids[first_draft:][:num_drafts]
            first_token, first_draft = first_token + num_tokens, first_draft + num_drafts
            if (text := self._texts.get(number)) is not None:
                text.waiting.append((advance.step_id, new, drafts))
                due.append((number, text))
        self._run(due)

    def _run(self, due: Sequence[tuple[int, TextGrammar]]) -> None:
        quick, slow = due, list[tuple[int, TextGrammar]]()
        if self._slow is not None:
            quick, slow = [t for t in due if not t[1].is_slow], [t for t in due if t[1].is_slow]
            for entry in slow:
                self._slow.submit(self._make, [entry])
        if quick:
            self._make(quick)

    def _make(self, due: Sequence[tuple[int, TextGrammar]]) -> None:
        """Make masks and send them."""
        rows, entries, draft_ids = MaskRows(len(due), self._vocab_size), list[_Entry](), list[int]()
        for number, text in due:
            before = rows.count
            try:
                with text.lock:  # of two threads with the same text the first does all, in order
                    if (newest := _catch_up(text, rows)) is not None:
                        entries.append((number, newest[0], text.num_accepted, rows.count - before))
                        draft_ids += newest[1]
            except Exception as error:
                rows.count = before
                self._reply(Refused(number, _why_refused(error)))
        if entries:
            self._reply(GrammarMasks(np.array(entries, np.int64), np.array(draft_ids, np.int32), rows.bitmasks()))


def _why_refused(error: Exception) -> RayppError:
    """Return what ends a text while the others go on; xgrammar's own errors are RuntimeErrors."""
    if isinstance(error, RayppError):
        return error
    return RequestError("a grammar cannot be followed", got=str(error)[:300])


_Entry = tuple[int, int, int, int]
"""See `GrammarMasks.entries`."""


def _catch_up(text: TextGrammar, rows: MaskRows) -> tuple[int, list[int]] | None:
    """Go on by all that has come, and add the masks behind it.

    Returns the newest step, and the drafts with a mask behind; None when another thread did it.
    """
    began_s, newest = time.perf_counter(), None
    while text.waiting:
        newest = text.waiting.popleft()
        text.accept(newest[1])
    if newest is None:
        return None
    followed = text.add_masks(newest[2], rows)
    text.is_slow = time.perf_counter() - began_s > _SLOW_S
    return newest[0], followed

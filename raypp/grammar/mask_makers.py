"""The threads that make masks.

A mask mostly takes some microseconds: less than handing it to a thread. So masks are made by the reader, the thread
that takes the orders, but those of a text whose last ones took long, by others: xgrammar computes without the GIL. When
a mask takes long all of a sudden, another thread becomes the reader, and the one that makes the mask ends with it. So
a slow grammar holds up nobody but its own text.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np

from raypp.errors import RayppError, RequestError
from raypp.grammar.board import NUM_PLACES, Board
from raypp.grammar.grammar_messages import GrammarMasks, GrammarReply, Refused
from raypp.grammar.text_grammar import Advance, MaskRows, TextGrammar
from raypp.messages import Int32s, Int64s

_SLOW_NS = 5_000_000
_TAKE_OVER_S = 0.02
_MAX_SLOW_THREADS = 4
_MAX_REPLACED = 4
"""Readers that may be stuck in a mask; beyond that nobody takes over, and the driver has to end the process."""

_Entry = tuple[int, int, int, int]
"""See `GrammarMasks.entries`."""


@dataclass(eq=False)
class _Batch:
    """Masks that are sent together."""

    rows: MaskRows
    entries: list[_Entry] = field(default_factory=list)
    draft_ids: list[int] = field(default_factory=list)
    num_sent: int = 0  # rows that whoever took over has sent


class MaskMakers:
    """Makes masks of texts: the reader by `make_due`, and threads of its own."""

    def __init__(
        self, vocab_size: int, reply: Callable[[GrammarReply], None], board: Board | None, *, threads: bool = True
    ) -> None:
        """Make nothing yet.

        Args:
            vocab_size: V.
            reply: Takes the masks. From several threads.
            board: Where to note whose mask is being made; None: nowhere.
            threads: Whether slow masks are made by threads; else all are made by `make_due`.
        """
        self._vocab_size = vocab_size
        self._reply = reply
        self._board = board
        num_threads = max(2, min(_MAX_SLOW_THREADS, (os.cpu_count() or 1) // 2))
        self._slow = ThreadPoolExecutor(num_threads, "masks") if threads else None
        self._due: deque[TextGrammar] = deque()
        self._begun = threading.Event()
        # Guards all that follows, and `waiting` and `is_due` of the texts.
        self._lock = threading.Lock()
        self._free_places = list(range(NUM_PLACES))
        self._is_making = False
        self._current: tuple[TextGrammar, _Batch, int] | None = None  # the reader's, and when it was begun
        self._num_replaced = 0

    def put(self, text: TextGrammar, advance: Advance) -> None:
        """Take in what a text goes on by; `make_due` has to follow. From the reader."""
        with self._lock:
            text.waiting.append(advance)
            if text.is_due:
                return  # whoever has the text will see
            text.is_due = True
        self._hand_out(text)

    def make_due(self) -> bool:
        """Make the masks of all texts that are due, and send them. From the reader.

        Returns False when another thread has become the reader meanwhile; the caller has to end then.
        """
        if not self._due:
            return True
        self._is_making = True
        self._begun.set()
        batch = _Batch(MaskRows(len(self._due), self._vocab_size))
        while self._due:
            text = self._due.popleft()
            current = (text, batch, time.monotonic_ns())
            with self._lock:
                self._current = current
            self._follow(text, batch, current[2])
            with self._lock:
                is_replaced = self._current is not current
                self._num_replaced -= is_replaced
                self._current = None if not is_replaced else self._current
                goes_on = text.is_due = bool(text.waiting)
            if goes_on:
                self._hand_out(text)
            if is_replaced:
                self._send(batch)
                return False
        self._is_making = False
        self._send(batch)
        return True

    def watch(self, start_reader: Callable[[], None]) -> NoReturn:
        """Start readers: one now, and another one whenever a reader makes a mask that takes long."""
        never = threading.Event()
        start_reader()
        while True:
            self._begun.wait()
            self._begun.clear()
            while self._is_making:
                never.wait(_TAKE_OVER_S)
                if self._take_over():
                    start_reader()

    def _take_over(self) -> bool:
        """Take the rest away from a reader that makes a mask for too long; return whether there was one."""
        with self._lock:
            if self._current is None or self._num_replaced >= _MAX_REPLACED:
                return False
            text, batch, began_ns = self._current
            if time.monotonic_ns() - began_ns < _TAKE_OVER_S * 1e9:
                return False
            self._current, text.is_slow = None, True
            self._num_replaced += 1
            finished = GrammarMasks(*_arrays(batch))
            batch.num_sent = len(finished.bitmasks)
            batch.entries, batch.draft_ids = [], []
        if len(finished.entries):
            self._reply(finished)
        return True

    def _hand_out(self, text: TextGrammar) -> None:
        if text.is_slow and self._slow is not None:
            self._slow.submit(self._make_alone, text)
        else:
            self._due.append(text)

    def _make_alone(self, text: TextGrammar) -> None:
        """Make masks of a slow text until nothing more waits."""
        goes_on = True
        while goes_on:
            batch = _Batch(MaskRows(1, self._vocab_size))
            self._follow(text, batch, time.monotonic_ns())
            self._send(batch)
            with self._lock:
                goes_on = text.is_due = bool(text.waiting)

    def _follow(self, text: TextGrammar, batch: _Batch, began_ns: int) -> None:
        """Go on with a text by all that has come, and add its masks to a batch; refuse it if that cannot be."""
        if text.is_closed:
            text.waiting.clear()
            return
        place = None
        if self._board is not None:
            with self._lock:
                place = self._free_places.pop()
            self._board.write(place, text.number, began_ns)
        before, newest, drafts = batch.rows.count, None, list[int]()
        try:
            while text.waiting:
                newest = text.waiting.popleft()
                text.accept(newest[1])
            if newest is not None:
                drafts = text.add_masks(newest[2], batch.rows)
        except Exception as error:
            batch.rows.count, newest = before, None
            self._reply(Refused(text.number, _why_refused(error)))
        text.is_slow = time.monotonic_ns() - began_ns > _SLOW_NS
        if self._board is not None and place is not None:
            self._board.clear(place)
            with self._lock:
                self._free_places.append(place)
        if newest is not None:
            with self._lock:
                batch.entries.append((text.number, newest[0], text.num_accepted, batch.rows.count - before))
                batch.draft_ids += drafts

    def _send(self, batch: _Batch) -> None:
        if batch.entries:
            self._reply(GrammarMasks(*_arrays(batch)))


def _arrays(batch: _Batch) -> tuple[Int64s, Int32s, Int32s]:
    """Return the fields of `GrammarMasks`, of what was not sent; rows that are being written have no entry yet."""
    first, count = batch.num_sent, sum(entry[3] for entry in batch.entries)
    bitmasks = batch.rows.bitmasks(first, first + count)
    return np.array(batch.entries, np.int64).reshape(-1, 4), np.array(batch.draft_ids, np.int32), bitmasks


def _why_refused(error: Exception) -> RayppError:
    """Return what ends a text while the others go on; xgrammar's own errors are RuntimeErrors."""
    if isinstance(error, RayppError):
        return error
    return RequestError("a grammar cannot be followed", got=str(error)[:300], param="structured_outputs")

"""Who makes masks: a slow one holds up its own text alone, and it is known whose it is."""

from __future__ import annotations

import os
import threading
from queue import Queue
from typing import Any

import numpy as np

from raypp.errors import RequestError
from raypp.grammar.board import Board, create_board_file
from raypp.grammar.grammar_messages import GrammarMasks, GrammarReply, Refused
from raypp.grammar.mask_makers import MaskMakers
from raypp.grammar.text_grammar import MaskRows, TextGrammar

WAIT_S = 60.0


class Text(TextGrammar):
    """Allows the token that is its number, and may be held up."""

    def __init__(self, number: int) -> None:
        super().__init__(number, None, 64, None)
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.error: Exception | None = None

    def accept(self, token_ids) -> None:
        assert self.may_go_on.wait(WAIT_S)
        self.num_accepted += len(token_ids)
        if self.error is not None:
            raise self.error

    def add_masks(self, draft_ids, rows: MaskRows) -> list[int]:
        rows._rows[rows.count] = self.number
        rows.count += 1
        return []


class Rig:
    """Makers with readers of their own; orders go to whatever reader there is."""

    def __init__(self) -> None:
        self.replies: Queue[GrammarReply] = Queue()
        descriptor = create_board_file()
        self.board, theirs = Board(descriptor), Board(descriptor)
        os.close(descriptor)
        self.makers = MaskMakers(64, self.replies.put, theirs)
        self.orders: Queue[list[tuple[Text, Any]]] = Queue()
        self.num_readers = 0
        threading.Thread(target=self.makers.watch, args=(self.start_reader,), daemon=True).start()

    def start_reader(self) -> None:
        self.num_readers += 1
        threading.Thread(target=self.read, daemon=True).start()

    def read(self) -> None:
        while self.makers.make_due():
            for text, advance in self.orders.get():
                self.makers.put(text, advance)

    def told(self, *numbers: int) -> dict[int, list[int]]:
        """Return the entry of each text, all of which have to be told of now."""
        found: dict[int, list[int]] = {}
        while found.keys() != set(numbers):
            reply = self.replies.get(timeout=WAIT_S)
            assert isinstance(reply, GrammarMasks), reply
            assert len(reply.entries) == len(reply.bitmasks)
            for entry, mask in zip(reply.entries.tolist(), reply.bitmasks, strict=True):
                assert (mask == entry[0]).all(), "a mask of another text"
                found[entry[0]] = entry
        return found


def test_a_mask_that_takes_long_all_of_a_sudden_holds_up_no_other_text() -> None:
    rig = Rig()
    texts = [Text(number) for number in range(1, 6)]
    rig.orders.put([(text, (0, [7], [])) for text in texts])
    rig.told(1, 2, 3, 4, 5)
    slow = texts[2]
    slow.may_go_on.clear()
    rig.orders.put([(text, (1, [7], [])) for text in texts])
    rig.told(1, 2, 4, 5)
    assert [number for number, _ in rig.board.read()] == [3]
    rig.orders.put([(text, (2, [7], [])) for text in texts])
    assert rig.told(1, 2, 4, 5)[5] == [5, 2, 3, 1]
    [(number, took_s)] = rig.board.read()
    assert number == 3, "one thread at a time follows a text"
    assert took_s > 0.01
    slow.may_go_on.set()
    while rig.told(3)[3][1] < 2:
        pass
    assert slow.num_accepted == 3
    assert rig.num_readers == 2


def test_several_may_be_slow_at_once() -> None:
    rig = Rig()
    texts = [Text(number) for number in range(1, 5)]
    for text in texts[:3]:
        text.may_go_on.clear()
    rig.orders.put([(text, (0, [7], [])) for text in texts])
    rig.told(4)
    assert {number for number, _ in rig.board.read()} == {1, 2, 3}
    for text in texts:
        text.may_go_on.set()
    rig.told(1, 2, 3)


def test_who_cannot_go_on_is_refused_alone_and_who_is_closed_is_passed_over() -> None:
    replies: list[GrammarReply] = []
    makers = MaskMakers(64, replies.append, None, threads=False)
    first, failing, closed, last = (Text(number) for number in range(1, 5))
    failing.error, closed.is_closed = RuntimeError("out of memory"), True
    for text in (first, failing, closed, last):
        makers.put(text, (0, [], []))
    assert makers.make_due()
    refused, masks = replies
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, RequestError)
    assert refused.number == 2
    assert isinstance(masks, GrammarMasks)
    assert masks.entries[:, 0].tolist() == [1, 4]
    assert np.array_equal(masks.bitmasks[:, 0], [1, 4])

"""The driver's side of grammars: a process that dies, or never answers, costs few requests and no others."""

from __future__ import annotations

import numpy as np
import pytest

from raypp.driver import grammars as module
from raypp.driver.grammar_process import GrammarProcessDied, GrammarReply
from raypp.driver.grammars import Grammars
from raypp.errors import RequestError
from raypp.grammar.messages import NO_TOKENS_YET, GrammarAdvance, GrammarMasks, GrammarOrder, OpenGrammar, Refused
from raypp.messages import MaskUpdate
from raypp.scheduler.request import Request, RequestUpdate
from raypp.types import SamplingParams


class Backend:
    """Notes orders, and says what it is told to say."""

    def __init__(self) -> None:
        self.orders: list[GrammarOrder] = []
        self.replies: list[GrammarReply | GrammarProcessDied] = []
        self.num_restarts = 0

    def send(self, order: GrammarOrder) -> None:
        self.orders.append(order)

    def receive(self) -> list[GrammarReply | GrammarProcessDied]:
        replies, self.replies = self.replies, []
        return replies

    def fileno(self) -> None:
        return None

    def restart(self) -> None:
        self.num_restarts += 1

    def close(self) -> None:
        pass

    def allow(self, number: int, num_accepted: int, after: int = NO_TOKENS_YET) -> None:
        self.replies.append(
            GrammarMasks(
                entries=np.array([[number, after, num_accepted, 1]]),
                draft_ids=np.empty(0, np.int32),
                bitmasks=np.full((1, 2), number, np.int32),
            )
        )


class Driver:
    def __init__(self) -> None:
        self.backend, self.sent = Backend(), list[MaskUpdate]()
        self.grammars = Grammars(self.backend, self.sent.append)

    def opened(self, name: str) -> Request:
        request = Request(name, np.array([1, 2, 3], np.int32), SamplingParams(structured_outputs={"regex": "a+"}), 0)
        self.grammars.open(request)
        return request


def test_a_request_runs_when_its_grammar_is_there() -> None:
    driver = Driver()
    request = driver.opened("a")
    assert driver.grammars.poll().admitted == []
    assert driver.grammars.num_held_back == 1
    driver.backend.allow(1, 0)
    assert driver.grammars.poll().admitted == [request]
    assert not driver.sent  # it has no row yet
    driver.grammars.note_started(request, row=4, step_id=7)
    [update] = driver.sent
    assert (update.rows.tolist(), update.moments.tolist()) == ([4], [[7, 6, 3, 1]])
    request.output_token_ids.append(9)
    driver.grammars.note_step(7, [RequestUpdate(request, [9], draft_ids=[5, 6])])
    assert isinstance(driver.backend.orders[-1], GrammarAdvance)
    assert driver.backend.orders[-1].draft_ids.tolist() == [5, 6]
    driver.backend.allow(1, 1, after=7)
    driver.grammars.poll()
    assert driver.sent[-1].moments.tolist() == [[7, 7, 4, 1]]


def test_what_is_refused_is_forgotten() -> None:
    driver = Driver()
    request = driver.opened("a")
    driver.backend.replies.append(Refused(1, RequestError("no")))
    [(refused, error)] = driver.grammars.poll().refused
    assert (refused, error.message) == (request, "no")
    assert driver.grammars.num_texts == 0


def test_after_a_death_all_texts_begin_again_where_they_were() -> None:
    driver = Driver()
    first, second = driver.opened("a"), driver.opened("b")
    driver.backend.allow(1, 0)
    driver.grammars.poll()
    first.output_token_ids += [7, 8]
    for _ in range(2):
        driver.backend.orders.clear()
        driver.backend.replies.append(GrammarProcessDied())
        assert not driver.grammars.poll().refused
        opened = [order for order in driver.backend.orders if isinstance(order, OpenGrammar)]
        assert [(order.number, order.token_ids) for order in opened] == [(1, [7, 8]), (2, [])]
    driver.backend.replies.append(GrammarProcessDied())
    assert {request for request, _ in driver.grammars.poll().refused} == {first, second}
    assert driver.backend.num_restarts == 3


def test_masks_that_never_come_cost_their_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    stuck, other = driver.opened("a"), driver.opened("b")
    driver.backend.allow(1, 0)
    driver.backend.allow(2, 0)
    driver.grammars.poll()
    driver.grammars.note_step(0, [RequestUpdate(stuck, [9], draft_ids=[])])
    assert not driver.grammars.poll().refused
    monkeypatch.setattr(module, "_MASK_TIMEOUT_S", 0.0)
    [(refused, error)] = driver.grammars.poll().refused
    assert refused is stuck
    assert "takes too long" in error.message
    assert isinstance(driver.backend.orders[-1], OpenGrammar)
    assert driver.backend.orders[-1].number == 2
    assert driver.grammars.num_texts == 1
    assert other.request_id == "b"

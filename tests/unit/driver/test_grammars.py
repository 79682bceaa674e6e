"""The driver's side of grammars: a process that dies, hangs, or never answers costs few requests and no others."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from raypp.driver import grammar_faults, grammars
from raypp.driver.grammar_process import GrammarEvent, GrammarProcessDied, GrammarProcessNotStarted
from raypp.driver.grammars import Grammars
from raypp.errors import RequestError
from raypp.grammar.compilers import MAX_COMPILERS
from raypp.grammar.grammar_messages import (
    NO_TOKENS_YET,
    CloseGrammar,
    Compiled,
    CompileGrammar,
    GrammarAdvance,
    GrammarMasks,
    GrammarOrder,
    NotCompiled,
    OpenGrammar,
    Ready,
    Refused,
    Unknown,
    key_of,
)
from raypp.messages import MaskUpdate
from raypp.scheduler.request import Request, RequestUpdate
from raypp.types import FinishReason, SamplingParams


class Backend:
    """Notes orders, and says what it is told to say; compiles if it is told to."""

    compile_timeout_s = 5.0

    def __init__(self) -> None:
        self.orders: list[GrammarOrder] = []
        self.replies: list[GrammarEvent] = []
        self.num_restarts = 0
        self.compiles = True
        self.making: list[tuple[int, float]] = []

    def send(self, order: GrammarOrder) -> None:
        self.orders.append(order)
        if isinstance(order, CompileGrammar) and self.compiles:
            self.replies.append(Compiled(key_of(order.source)))

    def receive(self) -> list[GrammarEvent]:
        replies, self.replies = self.replies, []
        return replies

    def computing(self) -> list[tuple[int, float]]:
        return self.making

    def fileno(self) -> None:
        return None

    def restart(self) -> None:
        self.num_restarts += 1
        self.replies.clear()
        self.making = []

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

    def sent(self, kind: type) -> list:
        return [order for order in self.orders if isinstance(order, kind)]


class Driver:
    def __init__(self) -> None:
        self.backend, self.sent = Backend(), list[MaskUpdate]()
        self.grammars = Grammars(self.backend, self.sent.append)

    def added(self, name: str, regex: str = "a+") -> Request:
        request = Request(name, np.array([1, 2, 3], np.int32), SamplingParams(structured_outputs={"regex": regex}), 0)
        self.grammars.add(request)
        return request

    def started(self, *names: str) -> list[Request]:
        """Return requests that have rows, and no mask yet; their numbers count from 1."""
        requests = [self.added(name) for name in names]
        self.backend.replies.append(Ready())
        self.grammars.poll()
        for row, request in enumerate(requests):
            self.grammars.note_started(request, row, 0)
        return requests


def test_a_request_runs_when_its_grammar_is_compiled_and_opens_when_it_has_a_row() -> None:
    driver = Driver()
    request = driver.added("a")
    assert driver.grammars.num_held_back == 1
    assert driver.grammars.is_held_back(request)
    assert driver.grammars.poll().admitted == [request]
    assert driver.grammars.num_held_back == 0
    assert not driver.backend.sent(OpenGrammar)
    driver.grammars.note_started(request, row=4, step_id=7)
    [order] = driver.backend.sent(OpenGrammar)
    assert (order.number, order.token_ids) == (1, [])
    assert not driver.sent
    driver.backend.allow(1, 0)
    driver.grammars.poll()
    [update] = driver.sent
    assert (update.rows.tolist(), update.moments.tolist()) == ([4], [[7, 6, 3, 1]])
    request.output_token_ids.append(9)
    driver.grammars.note_step(7, [RequestUpdate(request, [9], FinishReason.NONE, draft_ids=[5, 6])])
    assert isinstance(driver.backend.orders[-1], GrammarAdvance)
    assert driver.backend.orders[-1].draft_ids.tolist() == [5, 6]
    driver.backend.allow(1, 1, after=7)
    driver.grammars.poll()
    assert driver.sent[-1].moments.tolist() == [[7, 7, 4, 1]]
    driver.grammars.note_started(request, row=2, step_id=20)  # after a preemption
    assert driver.sent[-1].rows.tolist() == [2]
    assert len(driver.backend.sent(OpenGrammar)) == 1


def test_a_constraint_is_compiled_once_for_all_and_kept_in_memory_once() -> None:
    driver = Driver()
    first, second = driver.added("a"), driver.added("b", "".join(["a", "+"]))
    assert len(driver.backend.sent(CompileGrammar)) == 1
    assert driver.grammars.poll().admitted == [first, second]
    third = Request("c", np.array([1], np.int32), SamplingParams(structured_outputs={"regex": "".join(["a", "+"])}), 0)
    assert driver.grammars.add(third), "it may run at once"
    values = [request.params.structured_outputs["regex"] for request in (first, second, third)]
    assert all(value is values[0] for value in values)
    for request in (first, second, third):
        driver.grammars.close(request)
    assert not driver.backend.sent(CloseGrammar), "none was open"


def test_few_are_compiled_at_a_time_and_those_that_left_not_at_all() -> None:
    driver = Driver()
    driver.backend.compiles = False
    requests = [driver.added(str(index), f"a{{{index + 1}}}") for index in range(MAX_COMPILERS + 2)]
    ordered = driver.backend.sent(CompileGrammar)
    assert len(ordered) == MAX_COMPILERS
    driver.grammars.close(requests[MAX_COMPILERS])
    driver.backend.replies.append(Compiled(key_of(ordered[0].source)))
    assert driver.grammars.poll().admitted == requests[:1]
    ordered = driver.backend.sent(CompileGrammar)
    assert len(ordered) == MAX_COMPILERS + 1
    assert "a{6}" in ordered[-1].source


def test_what_is_refused_is_forgotten() -> None:
    driver = Driver()
    driver.backend.compiles = False
    first, second = driver.added("a"), driver.added("b")
    driver.backend.replies.append(NotCompiled(key_of(driver.backend.orders[0].source), RequestError("no")))
    news = driver.grammars.poll()
    assert [request for request, _ in news.refused] == [first, second]
    assert not news.failed
    assert driver.grammars.num_texts == driver.grammars.num_held_back == 0
    driver = Driver()
    [running] = driver.started("c")
    driver.backend.replies.append(Refused(1, RequestError("not further")))
    assert [request for request, _ in driver.grammars.poll().failed] == [running]
    assert driver.grammars.num_texts == 0


def test_a_constraint_that_was_thrown_out_is_compiled_again() -> None:
    driver = Driver()
    [request] = driver.started("a")
    request.output_token_ids += [7]
    driver.backend.orders.clear()
    driver.backend.replies.append(Unknown(1))
    driver.grammars.poll()
    driver.grammars.note_step(3, [RequestUpdate(request, [], FinishReason.NONE, draft_ids=[])])  # nobody follows it
    driver.grammars.poll()
    [_, opened] = driver.backend.orders
    assert (opened.number, opened.token_ids) == (1, [7])


def test_after_a_death_texts_with_a_row_begin_again_where_they_were() -> None:
    driver = Driver()
    first, second = driver.started("a", "b")
    waiting = driver.added("c")
    driver.grammars.poll()
    first.output_token_ids += [7, 8]
    driver.backend.orders.clear()
    driver.backend.replies.append(GrammarProcessDied())
    driver.grammars.poll()
    driver.grammars.poll()
    assert len(driver.backend.sent(CompileGrammar)) == 1
    assert [(order.number, order.token_ids) for order in driver.backend.sent(OpenGrammar)] == [(1, [7, 8]), (2, [])]
    driver.grammars.note_started(waiting, row=5, step_id=9)
    assert driver.backend.orders[-1].number == 3
    assert second.request_id == "b"


def test_who_is_computed_when_the_process_dies_is_blamed_and_nobody_else() -> None:
    driver = Driver()
    killer, _ = driver.started("a", "b")
    for _ in range(grammar_faults.MAX_DEATHS):
        driver.backend.replies.append(GrammarProcessDied((1,)))
        news = driver.grammars.poll()
        assert not news.failed
        driver.grammars.poll()
    driver.backend.replies.append(GrammarProcessDied((1,)))
    [(failed, error)] = driver.grammars.poll().failed
    assert failed is killer
    assert "died over this request" in error.message
    assert driver.grammars.num_texts == 1


def test_a_process_that_dies_again_and_again_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    running, held_back = driver.started("a")[0], None
    driver.backend.compiles = False
    for _ in range(grammar_faults.MAX_RESTARTS - 1):
        driver.backend.replies.append(GrammarProcessDied())
        assert not driver.grammars.poll().failed
    held_back = driver.added("b", "b+")
    num_orders = len(driver.backend.orders)
    driver.backend.replies.append(GrammarProcessDied())
    news = driver.grammars.poll()
    assert [request for request, _ in news.failed] == [running]
    assert [request for request, _ in news.refused] == [held_back]
    assert "keeps failing" in news.refused[0][1].message
    driver.added("c")
    assert len(driver.grammars.poll().refused) == 1
    assert len(driver.backend.sent(CompileGrammar)) == len(
        [order for order in driver.backend.orders[:num_orders] if isinstance(order, CompileGrammar)]
    )
    monkeypatch.setattr(grammar_faults, "RESTARTS_WINDOW_S", 0.0)
    driver.backend.compiles = True
    again = driver.added("d")
    assert driver.grammars.poll().admitted == [again]


def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return what lets time pass."""
    passed = [0.0]
    real = time.monotonic
    monkeypatch.setattr(grammars.time, "monotonic", lambda: real() + passed[0])

    def wait(seconds: float) -> None:
        passed[0] += seconds

    return wait


def test_the_text_whose_mask_takes_too_long_is_refused_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, wait = Driver(), later(monkeypatch)
    waiting, slow = driver.started("a", "b")
    wait(21)
    driver.backend.making = [(2, 15.0)]
    [(failed, error)] = driver.grammars.poll().failed
    assert failed is slow
    assert "takes too long" in error.message
    assert driver.backend.num_restarts == 0
    assert not driver.grammars.poll().failed, "the other one has waited for nothing yet"
    driver.grammars.close(waiting)
    driver.grammars.poll()
    assert driver.backend.num_restarts == 1, "nobody is left, and the thread still computes"


def test_a_frozen_process_is_replaced_and_nobody_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, wait = Driver(), later(monkeypatch)
    [request] = driver.started("a")
    driver.backend.allow(1, 0)
    driver.grammars.poll()
    wait(1000)
    driver.grammars.poll()
    assert driver.backend.num_restarts == 0, "nothing was asked of it"
    driver.grammars.note_step(0, [RequestUpdate(request, [], FinishReason.NONE, draft_ids=[])])
    wait(21)
    news = driver.grammars.poll()
    assert driver.backend.num_restarts == 1
    assert not news.failed
    wait(100)  # that the new process takes to start
    assert not driver.grammars.poll().failed
    assert driver.backend.num_restarts == 1
    driver.backend.replies.append(Ready())
    driver.grammars.poll()
    wait(19)
    driver.grammars.poll()
    assert driver.backend.num_restarts == 1
    driver.backend.allow(1, 0)
    assert not driver.grammars.poll().failed


def test_who_waits_for_a_compiler_of_a_frozen_process_is_told_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, wait = Driver(), later(monkeypatch)
    driver.backend.compiles = False
    request = driver.added("a")
    for num_restarts in (1, 2):
        wait(1000)
        assert not driver.grammars.poll().refused
        driver.backend.replies.append(Ready())
        driver.grammars.poll()
        wait(16)
        news = driver.grammars.poll()
        assert driver.backend.num_restarts == num_restarts
    assert [failed for failed, _ in news.refused] == [request]
    assert "was not compiled" in news.refused[0][1].message


def test_a_process_that_cannot_be_started_costs_those_that_asked_for_it() -> None:
    driver = Driver()
    driver.backend.compiles = False
    request = driver.added("a")
    driver.backend.replies.append(GrammarProcessNotStarted("Too many open files"))
    [(refused, error)] = driver.grammars.poll().refused
    assert refused is request
    assert "Too many open files" in str(error)
    driver.backend.compiles = True
    other = driver.added("b")
    assert driver.grammars.poll().admitted == [other]


def test_a_turn_costs_nothing_for_requests_that_wait() -> None:
    def seconds(num_waiting: int) -> float:
        driver = Driver()
        for index in range(num_waiting):
            driver.added(str(index), f"a{{{index % 100}}}")
            driver.grammars.poll()
        [running] = driver.started("running")
        assert driver.grammars.num_held_back == 0
        fastest = float("inf")
        for step_id in range(100):
            started_s = time.perf_counter()
            driver.grammars.note_step(step_id, [RequestUpdate(running, [], FinishReason.NONE, draft_ids=[])])
            driver.backend.allow(num_waiting + 1, 0, step_id)
            driver.grammars.poll()
            driver.grammars.num_held_back  # noqa: B018
            fastest = min(fastest, time.perf_counter() - started_s)
        assert not driver.backend.sent(OpenGrammar)[1:], "those that wait have no masks"
        return fastest

    few = seconds(10)
    assert seconds(3000) < 5 * few + 1e-4

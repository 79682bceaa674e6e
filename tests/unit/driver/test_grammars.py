"""The driver's side of grammars: what is late, takes too long or goes wrong costs its own request and no others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import pytest

from raypp.driver import grammars
from raypp.driver.grammars import GrammarNews, Grammars
from raypp.errors import RequestError
from raypp.grammar.grammar_threads import MAX_COMPILERS, CompileJob, Job, MaskJob, SlowMaskJob
from raypp.grammar.vocabulary import Vocabulary
from raypp.messages import MaskUpdate
from raypp.request import Request, RequestUpdate
from raypp.types import FinishReason, SamplingParams

END = 255
BYTES = Vocabulary.of_tokens([*(bytes([byte]) for byte in range(END)), b""], [END])
COMPILE_TIMEOUT_S = 5.0

J = TypeVar("J", bound=Job)


class Backend:
    """Does jobs when it is told to; those that compile at once, unless it is told not to."""

    def __init__(self) -> None:
        self.compiles = True
        self.submitted: list[Job] = []
        self.done: list[Job] = []
        self.given_up: list[Job] = []

    def submit(self, job: Job) -> None:
        self.submitted.append(job)
        if isinstance(job, CompileJob) and self.compiles:
            self.do(job)

    def do(self, *jobs: Job) -> None:
        for job in jobs:
            job.run(lambda: BYTES)
            self.done.append(job)

    def receive(self) -> list[Job]:
        done, self.done = self.done, []
        return done

    def give_up(self, job: Job) -> None:
        self.given_up.append(job)

    def fileno(self) -> None:
        return None

    def close(self) -> None:
        pass

    def sent(self, kind: type[J]) -> list[J]:
        return [job for job in self.submitted if isinstance(job, kind)]


class Driver:
    def __init__(self) -> None:
        self.backend, self.sent = Backend(), list[MaskUpdate]()
        self.grammars = Grammars(self.backend, COMPILE_TIMEOUT_S, self.sent.append)

    def added(self, name: str, regex: str = "a+") -> Request:
        request = Request(name, np.array([1, 2, 3], np.int32), SamplingParams(structured_outputs={"regex": regex}), 0)
        self.grammars.add(request)
        return request

    def started(self, *names: str) -> list[Request]:
        """Return requests that have rows, and no mask yet."""
        requests = [self.added(name) for name in names]
        self.grammars.poll()
        for row, request in enumerate(requests):
            self.grammars.note_started(request, row, 0)
        return requests

    def yielded(self, step_id: int, request: Request, text: str, drafts: Sequence[int] = ()) -> None:
        tokens = list(text.encode())
        request.output_token_ids += tokens
        self.grammars.note_step(step_id, [RequestUpdate(request, tokens, FinishReason.NONE, draft_ids=list(drafts))])

    def made(self) -> GrammarNews:
        """Return the news once all masks are made."""
        self.backend.do(*(job for job in self.backend.sent(MaskJob) if job.began_s is None))
        return self.grammars.poll()


def allowed(bitmask: np.ndarray) -> bytes:
    return bytes(np.flatnonzero(np.unpackbits(bitmask.view(np.uint8), bitorder="little")).tolist())


def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return what lets time pass."""
    passed = [0.0]
    real = time.monotonic
    monkeypatch.setattr(grammars.time, "monotonic", lambda: real() + passed[0])

    def wait(seconds: float) -> None:
        passed[0] += seconds

    return wait


def test_a_request_runs_when_its_grammar_is_compiled_and_is_followed_when_it_has_a_row() -> None:
    driver = Driver()
    request = driver.added("a", "ab+")
    assert driver.grammars.num_held_back == 1
    assert driver.grammars.is_held_back(request)
    assert driver.grammars.poll().admitted == [request]
    assert driver.grammars.num_held_back == 0
    assert not driver.backend.sent(MaskJob)
    driver.grammars.note_started(request, row=4, step_id=7)
    assert not driver.sent
    driver.made()
    [update] = driver.sent
    assert (update.rows.tolist(), update.moments.tolist()) == ([4], [[7, 6, 3, 1]])
    assert allowed(update.bitmasks[0]) == b"a"
    driver.yielded(7, request, "a", b"bc")
    driver.made()
    assert driver.sent[-1].moments.tolist() == [[7, 7, 4, 2]]
    assert driver.sent[-1].draft_ids.tolist() == list(b"b")
    assert [allowed(mask) for mask in driver.sent[-1].bitmasks] == [b"b", b"b" + bytes([END])]
    driver.grammars.note_started(request, row=2, step_id=20)  # after a preemption
    assert driver.sent[-1].rows.tolist() == [2]
    assert len(driver.backend.sent(MaskJob)) == 2


def test_what_comes_while_a_mask_is_made_is_in_the_next_one() -> None:
    driver = Driver()
    [request] = driver.started("a")
    driver.yielded(0, request, "")
    driver.yielded(1, request, "a")
    assert len(driver.backend.sent(MaskJob)) == 1, "one thread at a time follows a text"
    driver.made()
    assert driver.sent[-1].moments[0].tolist() == [0, -1, 3, 1]
    assert len(driver.backend.sent(MaskJob)) == 2
    driver.made()
    assert driver.sent[-1].moments[0].tolist() == [0, 1, 4, 1]
    assert len(driver.backend.sent(MaskJob)) == 2


def test_a_text_whose_masks_take_long_is_kept_apart_until_they_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    [request] = driver.started("a")
    monkeypatch.setattr(grammars, "_SLOW_S", -1.0)
    driver.made()
    driver.yielded(0, request, "a")
    assert isinstance(driver.backend.submitted[-1], SlowMaskJob)
    monkeypatch.undo()
    driver.made()
    driver.yielded(1, request, "a")
    assert not isinstance(driver.backend.submitted[-1], SlowMaskJob)


def test_a_constraint_is_compiled_once_for_all_and_kept_in_memory_once() -> None:
    driver = Driver()
    first, second = driver.added("a"), driver.added("b", "".join(["a", "+"]))
    assert len(driver.backend.sent(CompileJob)) == 1
    assert driver.grammars.poll().admitted == [first, second]
    third = Request("c", np.array([1], np.int32), SamplingParams(structured_outputs={"regex": "".join(["a", "+"])}), 0)
    assert driver.grammars.add(third), "it may run at once"
    values = [request.params.structured_outputs["regex"] for request in (first, second, third)]
    assert all(value is values[0] for value in values)
    for request in (first, second, third):
        driver.grammars.close(request)
    driver.added("d")
    assert len(driver.backend.sent(CompileJob)) == 1, "it is kept for a while"


def test_few_are_compiled_at_a_time_and_those_that_left_not_at_all() -> None:
    driver = Driver()
    driver.backend.compiles = False
    requests = [driver.added(str(index), f"a{{{index + 1}}}") for index in range(MAX_COMPILERS + 2)]
    jobs = driver.backend.sent(CompileJob)
    assert len(jobs) == MAX_COMPILERS
    driver.grammars.close(requests[MAX_COMPILERS])
    driver.backend.do(jobs[0])
    assert driver.grammars.poll().admitted == requests[:1]
    jobs = driver.backend.sent(CompileJob)
    assert len(jobs) == MAX_COMPILERS + 1
    assert "a{6}" in jobs[-1].source


def test_what_is_refused_is_forgotten() -> None:
    driver = Driver()
    driver.backend.compiles = False
    first, second = driver.added("a", "("), driver.added("b", "(")
    driver.backend.do(*driver.backend.sent(CompileJob))
    news = driver.grammars.poll()
    assert [request for request, _ in news.refused] == [first, second]
    assert not news.failed
    assert len(driver.grammars.texts) == driver.grammars.num_held_back == 0
    driver = Driver()
    running, other = driver.started("c", "d")
    driver.made()
    driver.yielded(0, running, "b")
    driver.yielded(0, other, "a")
    [(failed, error)] = driver.made().failed
    assert failed is running
    assert "left its grammar" in error.message
    assert len(driver.grammars.texts) == 1
    assert driver.sent[-1].rows.tolist() == [1]


def test_masks_of_a_request_that_has_ended_go_nowhere() -> None:
    driver = Driver()
    first, second = driver.started("a", "b")
    driver.grammars.close(first)
    driver.grammars.note_step(0, [RequestUpdate(second, [97], FinishReason.STOP, draft_ids=[])])
    driver.made()
    assert not driver.sent
    assert len(driver.grammars.texts) == 0


def test_a_constraint_that_was_thrown_out_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "_MAX_KEPT_BYTES", 0)
    driver = Driver()
    request = driver.added("a")
    driver.added("b", "b+")
    assert len(driver.grammars.poll().admitted) == 2
    request.output_token_ids += b"aa"
    driver.grammars.note_started(request, 0, 0)
    assert [job.source for job in driver.backend.sent(CompileJob)][::2] == ['{"regex": "a+"}'] * 2
    driver.grammars.note_step(3, [RequestUpdate(request, [], FinishReason.NONE, draft_ids=[])])  # nothing follows it
    driver.grammars.poll()
    driver.made()
    assert driver.sent[-1].moments[0].tolist() == [0, -1, 5, 1]


def test_a_constraint_that_takes_too_long_is_given_up_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, wait = Driver(), later(monkeypatch)
    driver.backend.compiles = False
    slow, queued = driver.added("a"), [driver.added(str(index), f"b{{{index}}}") for index in range(MAX_COMPILERS)]
    jobs = driver.backend.sent(CompileJob)
    wait(1000)
    assert not driver.grammars.poll().refused, "no thread has begun: the vocabulary is still loaded"
    jobs[0].began_s = time.monotonic()
    wait(COMPILE_TIMEOUT_S + 1)
    [(refused, error)] = driver.grammars.poll().refused
    assert refused is slow
    assert "takes longer than grammar_compile_timeout_s = 5" in str(error)
    assert driver.backend.given_up == jobs[:1]
    assert len(driver.backend.sent(CompileJob)) == MAX_COMPILERS + 1, "the next one is compiled in its place"
    driver.backend.do(*driver.backend.sent(CompileJob))
    assert set(driver.grammars.poll().admitted) == set(queued), "what comes too late is nobody's any more"
    assert len(driver.grammars.texts) == MAX_COMPILERS


def test_the_text_whose_mask_takes_too_long_is_refused_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, wait = Driver(), later(monkeypatch)
    waiting, slow = driver.started("a", "b")
    jobs = driver.backend.sent(MaskJob)
    jobs[1].began_s = time.monotonic()
    wait(grammars.MASK_TIMEOUT_S + 1)
    [(failed, error)] = driver.grammars.poll().failed
    assert failed is slow
    assert "takes too long" in error.message
    assert driver.backend.given_up == jobs[1:]
    driver.backend.do(jobs[0], jobs[1])
    assert not driver.grammars.poll().failed
    assert driver.sent[-1].rows.tolist() == [0]
    assert waiting.request_id == "a"


def test_when_no_thread_is_left_those_that_need_one_are_refused() -> None:
    driver = Driver()
    driver.backend.compiles = False
    request, error = driver.added("a"), RequestError("no thread is left")
    [job] = driver.backend.sent(CompileJob)
    job.error = error
    driver.backend.done.append(job)
    assert driver.grammars.poll().refused == [(request, error)]
    driver.backend.compiles = True
    running, *_ = driver.started("b")
    [making] = driver.backend.sent(MaskJob)
    making.error = error
    driver.backend.done.append(making)
    assert driver.grammars.poll().failed == [(running, error)]


def test_a_turn_costs_nothing_for_requests_that_wait() -> None:
    def seconds(num_waiting: int) -> float:
        driver = Driver()
        for index in range(num_waiting):
            driver.added(str(index), f"a{{{index % 100}}}")
            driver.grammars.poll()
        [running] = driver.started("running")
        driver.made()
        assert driver.grammars.num_held_back == 0
        fastest = float("inf")
        for step_id in range(100):
            started_s = time.perf_counter()
            driver.yielded(step_id, running, "")
            driver.backend.do(driver.backend.submitted[-1])
            driver.grammars.poll()
            driver.grammars.num_held_back  # noqa: B018
            fastest = min(fastest, time.perf_counter() - started_s)
        assert len(driver.backend.sent(MaskJob)) == 101, "those that wait have no masks"
        return fastest

    few = seconds(10)
    assert seconds(3000) < 5 * few + 1e-4

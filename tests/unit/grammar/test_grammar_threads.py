"""The threads that compile and make masks: whatever one of them does, no request waits without an end."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from raypp.config.engine_config import EngineConfig
from raypp.errors import RequestError
from raypp.grammar import grammar_threads
from raypp.grammar.compile import CompiledGrammar, compile_constraint
from raypp.grammar.grammar_threads import MAX_COMPILERS, CompileJob, GrammarThreads, Job, MaskJob, SlowMaskJob
from raypp.grammar.text_grammar import TextGrammar
from raypp.grammar.vocabulary import Vocabulary, VocabularySource
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.structured_outputs import as_structured_outputs, source_of

WAIT_S = 60.0
SOURCE = plan_engine(EngineConfig.from_flat("tiny"), Hardware(1)).vocabulary_source()


@pytest.fixture
def threads() -> Iterator[GrammarThreads]:
    threads = GrammarThreads(SOURCE)
    yield threads
    threads.close()


def source(**constraint: object) -> str:
    kept = as_structured_outputs(constraint)
    assert kept is not None
    return source_of(kept)


def done(threads: GrammarThreads, count: int) -> list[Job]:
    """Return the next jobs that are done, so many; waits for the descriptor, as the driver does."""
    found: list[Job] = []
    ends_s = time.monotonic() + WAIT_S
    while len(found) < count:
        assert time.monotonic() < ends_s, f"{len(found)} of {count} are done"
        select.select([threads.fileno()], [], [], 1.0)
        found += threads.receive()
    assert len(found) == count
    return found


class Held(CompileJob):
    """A job that goes on when it is let."""

    def __init__(self) -> None:
        super().__init__("")
        self.begun, self.may_go_on = threading.Event(), threading.Event()

    def do(self, vocabulary: Callable[[], Vocabulary]) -> None:
        self.thread = threading.current_thread()
        self.begun.set()
        assert self.may_go_on.wait(WAIT_S)


class HeldText:
    """A text that can be held up."""

    num_accepted = 0

    def __init__(self, *, is_held: bool = False) -> None:
        self.may_go_on = threading.Event()
        if not is_held:
            self.may_go_on.set()

    def accept(self, token_ids: list[int]) -> None:
        assert self.may_go_on.wait(WAIT_S)

    def masks(self, draft_ids: list[int]) -> tuple[list[int], Any]:
        return [], None


def mask_job(text: Any, kind: type[MaskJob] = MaskJob) -> MaskJob:
    return kind(text, [(0, [], [])])


def held(threads: GrammarThreads, count: int, monkeypatch: pytest.MonkeyPatch) -> list[Held]:
    """Return jobs that threads have begun and do not end."""
    monkeypatch.setitem(threads._pools, Held, threads._pools[CompileJob])
    jobs = [Held() for _ in range(count)]
    for job in jobs:
        threads.submit(job)
        assert job.begun.wait(WAIT_S)
    return jobs


def test_constraints_are_compiled_and_masks_made(threads: GrammarThreads) -> None:
    jobs = [CompileJob(source(regex=f"a{{{index}}}b")) for index in range(1, 9)]
    jobs.append(CompileJob(source(regex="(")))
    for job in jobs:
        threads.submit(job)
    done(threads, len(jobs))
    assert isinstance(jobs.pop().error, RequestError)
    assert [job.error for job in jobs] == [None] * 8
    texts = [TextGrammar(job.compiled, None) for job in jobs if job.compiled is not None]
    making = [MaskJob(text, [(3, [], [])]) for text in texts]
    for mask in making:
        threads.submit(mask)
    assert set(done(threads, 8)) == set(making)
    assert [(job.error, job.after_step, len(job.bitmasks)) for job in making] == [(None, 3, 1)] * 8


def test_a_slow_text_holds_up_no_other(threads: GrammarThreads) -> None:
    slow = [mask_job(HeldText(is_held=True), SlowMaskJob) for _ in range(8)]
    sudden = mask_job(HeldText(is_held=True))
    others = [mask_job(HeldText()) for _ in range(30)]
    for job in (*slow, sudden, *others):
        threads.submit(job)
    assert set(done(threads, 30)) == set(others)
    for job in (*slow, sudden):
        job._text.may_go_on.set()
    assert len(done(threads, 9)) == 9


def test_a_job_that_is_given_up_keeps_no_place(threads: GrammarThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = held(threads, MAX_COMPILERS, monkeypatch)
    waiting = CompileJob(source(regex="a"))
    threads.submit(waiting)
    threads.give_up(stuck[0])
    assert done(threads, 1) == [waiting]
    threads.give_up(stuck[0])
    for job in stuck:
        job.may_go_on.set()
    assert set(done(threads, MAX_COMPILERS)) == set(stuck)
    stuck[0].thread.join(WAIT_S)
    assert not stuck[0].thread.is_alive()
    assert len(threads._pools[CompileJob].threads) == MAX_COMPILERS
    again = held(threads, MAX_COMPILERS, monkeypatch)
    for job in again:
        job.may_go_on.set()
    done(threads, MAX_COMPILERS)


def test_when_all_are_given_up_jobs_fail_until_one_of_them_ends(
    threads: GrammarThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = list[Held]()
    for _ in range(2):
        stuck += held(threads, MAX_COMPILERS, monkeypatch)
        waiting = CompileJob(source(regex="a"))
        threads.submit(waiting)
        for job in stuck:
            threads.give_up(job)
    failed = [job for job in done(threads, 2) if job.error is not None]
    assert failed == [waiting], "the one that waited when the last thread was given up"
    late = CompileJob(source(regex="b"))
    threads.submit(late)
    assert done(threads, 1) == [late]
    assert "no thread is left" in str(late.error)
    assert f"{2 * MAX_COMPILERS} threads" in str(late.error)
    text = mask_job(HeldText())
    threads.submit(text)
    assert done(threads, 1) == [text], "masks have threads of their own"
    assert text.error is None
    stuck[0].may_go_on.set()
    assert done(threads, 1) == [stuck[0]]
    good = CompileJob(source(regex="c"))
    threads.submit(good)
    assert done(threads, 1) == [good]
    assert good.error is None
    for job in stuck:
        job.may_go_on.set()


def test_where_no_thread_can_be_started_jobs_fail(threads: GrammarThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        job = CompileJob(source(regex="a"))
        threads.submit(job)
    assert done(threads, 1) == [job]
    assert "no thread is left" in str(job.error)
    again = CompileJob(source(regex="a"))
    threads.submit(again)
    assert done(threads, 1) == [again]
    assert again.error is None


@pytest.mark.parametrize("error", [ZeroDivisionError("x"), BaseException("a panic")])
def test_whatever_goes_wrong_in_a_thread_is_an_error_of_its_job(
    threads: GrammarThreads, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(grammar_threads, "compile_constraint", fail)
    for _ in range(2 * MAX_COMPILERS + 1):
        job = CompileJob(source(regex="a"))
        threads.submit(job)
        assert done(threads, 1) == [job]
        assert isinstance(job.error, RequestError)
        assert str(error) in str(job.error)


def test_jobs_wait_for_the_vocabulary_and_their_time_begins_then(monkeypatch: pytest.MonkeyPatch) -> None:
    may_load, load = threading.Event(), VocabularySource.load

    def late(of: VocabularySource) -> Vocabulary:
        assert may_load.wait(WAIT_S)
        return load(of)

    monkeypatch.setattr(VocabularySource, "load", late)
    threads = GrammarThreads(SOURCE)
    job = CompileJob(source(regex="a"))
    threads.submit(job)
    assert threads.receive() == []
    assert job.began_s is None
    may_load.set()
    assert done(threads, 1) == [job]
    assert (job.error, job.began_s is None) == (None, False)
    threads.close()
    monkeypatch.setattr(grammar_threads, "_LOAD_TIMEOUT_S", 0.01)
    may_load.clear()
    threads = GrammarThreads(SOURCE)
    job = CompileJob(source(regex="a"))
    threads.submit(job)
    assert done(threads, 1) == [job]
    assert "was not loaded within" in str(job.error)
    may_load.set()
    threads.close()


def test_without_a_tokenizer_every_constraint_is_refused() -> None:
    threads = GrammarThreads(VocabularySource("nowhere", 1000, (0,)))
    for _ in range(2):
        job = CompileJob(source(regex="a"))
        threads.submit(job)
        assert done(threads, 1) == [job]
        assert "cannot serve structured_outputs" in str(job.error)
    threads.close()


def test_close_ends_the_threads_and_begins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    threads = GrammarThreads(SOURCE)
    [stuck] = held(threads, 1, monkeypatch)
    for _ in range(3):
        held(threads, 1, monkeypatch)[0].may_go_on.set()
    done(threads, 3)
    monkeypatch.setattr(grammar_threads, "_END_TIMEOUT_S", 0.0)
    threads.close()
    assert threads.fileno() is None
    stuck.may_go_on.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(WAIT_S)
        assert not thread.is_alive()


class DeepJob(CompileJob):
    """A job that compiles a grammar without asking how deep it is."""

    def do(self, vocabulary: Callable[[], Vocabulary]) -> None:
        self.compiled = CompiledGrammar(self.source, vocabulary())


def test_rules_within_rules_take_no_more_stack_than_a_thread_has(
    threads: GrammarThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(threads._pools, DeepJob, threads._pools[CompileJob])
    rules = "\n".join(f'r{index}: r{index + 1} "x"?' for index in range(6_000))
    job = DeepJob(f'%llguidance {{}}\nstart: r0\n{rules}\nr6000: "a"')
    threads.submit(job)
    assert done(threads, 1) == [job]
    assert job.error is None


def test_another_thread_goes_on_while_a_grammar_is_compiled(threads: GrammarThreads) -> None:
    """This one has the part of the driver's loop."""
    lark = "%llguidance {}\nstart: A\nA: " + " | ".join(f'"{"x" * (index % 1500)}"' for index in range(1350))
    gaps = list[float]()
    for _ in range(3):  # on a machine that others use, too
        job = CompileJob(source(grammar=lark))
        threads.submit(job)
        last_s = began_s = time.perf_counter()
        gaps.append(0.0)
        while not job.is_done:
            time.sleep(0.0005)
            now_s = time.perf_counter()
            gaps[-1], last_s = max(gaps[-1], now_s - last_s), now_s
        threads.receive()
        print(f"\nlongest gap {1e3 * gaps[-1]:.1f} ms of {last_s - began_s:.2f} s")
        assert job.error is None
        if gaps[-1] < (last_s - began_s) / 4:
            return
    raise AssertionError(f"the GIL was held for {gaps} s")


def test_equal_threads_make_equal_masks(threads: GrammarThreads) -> None:
    compiled = compile_constraint(source(regex="(ab|cd){20}"), threads._loaded())
    make = partial(TextGrammar, compiled, None)
    token_ids = list(threads._loaded().tokenizer.greedy_tokenize("abcdab"))
    alone = make()
    alone.accept(token_ids)
    _, expected = alone.masks(token_ids)
    jobs = [MaskJob(make(), [(0, token_ids, []), (1, [], token_ids)]) for _ in range(32)]
    for job in jobs:
        threads.submit(job)
    done(threads, 32)
    assert all((job.bitmasks == expected).all() for job in jobs)
    assert all(list(job.draft_ids) == token_ids[: len(expected) - 1] for job in jobs)

"""What runs in the loop ends with its caller, wherever an interrupt strikes."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator

import pytest

from raypp.api.llm import EventLoopThread
from raypp.errors import EngineDeadError

DEADLINE_S = 20.0


@pytest.fixture
def thread() -> Iterator[EventLoopThread]:
    thread = EventLoopThread("test")
    yield thread
    thread.close()


class Sleeper:
    """A coroutine that never ends by itself."""

    def __init__(self) -> None:
        self.began, self.ended = threading.Event(), threading.Event()

    async def run(self) -> None:
        self.began.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.set()


def test_results_and_errors_come_back(thread: EventLoopThread) -> None:
    async def divide(a: int, b: int) -> float:
        await asyncio.sleep(0)
        return a / b

    assert thread.run(divide(1, 2)) == 0.5
    with pytest.raises(ZeroDivisionError):
        thread.run(divide(1, 0))
    assert thread.call(threading.current_thread).name == "test"


@pytest.mark.parametrize("is_handed_over", [True, False])
def test_an_interrupt_while_it_is_handed_over(
    thread: EventLoopThread, monkeypatch: pytest.MonkeyPatch, is_handed_over: bool
) -> None:
    sleeper, hand_over = Sleeper(), thread._loop.call_soon_threadsafe

    def interrupted(callback, *args):
        monkeypatch.undo()
        if is_handed_over:
            hand_over(callback, *args)
            assert sleeper.began.wait(DEADLINE_S)
        raise KeyboardInterrupt

    monkeypatch.setattr(thread._loop, "call_soon_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        thread.run(sleeper.run())
    assert thread.call(lambda: 1) == 1  # the cancellation has been taken in
    assert sleeper.began.is_set() == is_handed_over
    if is_handed_over:
        assert sleeper.ended.wait(DEADLINE_S)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_interrupts_at_any_moment_leave_nothing_behind(thread: EventLoopThread) -> None:
    """Real signals, from before a coroutine is made until long after it began."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handler = signal.signal(signal.SIGALRM, interrupt)
    sleepers = [Sleeper() for _ in range(300)]
    try:
        for index, sleeper in enumerate(sleepers):
            with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - it may strike at once
                signal.setitimer(signal.ITIMER_REAL, 1e-6 * (1 + 2 * index))
                thread.run(sleeper.run())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    assert thread.call(lambda: len(asyncio.all_tasks())) == 2  # its own, and this one
    assert all(sleeper.ended.is_set() for sleeper in sleepers if sleeper.began.is_set())
    assert any(sleeper.began.is_set() for sleeper in sleepers)


def test_what_the_loops_own_thread_ends_is_only_begun_there(thread: EventLoopThread) -> None:
    ended = threading.Event()

    async def end() -> None:
        ended.set()

    thread.call(lambda: thread.finish(end()))
    assert ended.wait(DEADLINE_S)
    ended.clear()
    thread.finish(end())
    assert ended.is_set()


def test_a_closed_thread_says_so(thread: EventLoopThread) -> None:
    thread.close()
    sleeper = Sleeper()
    with pytest.raises(EngineDeadError, match="closed"):
        thread.run(sleeper.run())
    assert not sleeper.began.is_set()


def test_what_does_not_end_is_cancelled_at_the_close(thread: EventLoopThread) -> None:
    sleeper, errors = Sleeper(), []

    def wait() -> None:
        try:
            thread.run(sleeper.run())
        except EngineDeadError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert sleeper.began.wait(DEADLINE_S)
    thread.close()
    waiting.join(DEADLINE_S)
    assert not waiting.is_alive()
    assert len(errors) == 1

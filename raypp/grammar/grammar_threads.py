"""Compiles grammars and makes masks, in threads of the driver's process: llguidance does both without the GIL.

    driver's loop: submit(job) --> queue of its kind --> a thread: job.run() --> done, descriptor --> receive()

A thread cannot be interrupted. So one whose job takes too long is given up: it goes on at the lowest priority, another
one takes its place, and when its job ends after all, it ends with that. Of each kind there are as many threads to take
a place as there are places; when all of those are given up, too, jobs of the kind fail at once until one of them ends.

Masks under a constraint whose last ones took long are made by threads of their own: what is slow holds up itself alone.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Protocol

from raypp.errors import RayppError, RequestError
from raypp.grammar.compile import CompiledGrammar, compile_constraint
from raypp.grammar.text_grammar import TextGrammar
from raypp.grammar.vocabulary import Vocabulary, VocabularySource
from raypp.messages import NO_INT32S, NO_STEP, Int32s

MAX_COMPILERS = 4
"""Constraints that are compiled at a time."""

_MAX_MASK_MAKERS, _NUM_SLOW_MAKERS = 8, 4
_LOAD_TIMEOUT_S = 300.0  # of a tokenizer on a slow disk
_END_TIMEOUT_S = 1.0
_STACK_BYTES = 1 << 28  # reserved, not taken: llguidance needs up to 16 KiB for each rule that is within another
_LOWEST_PRIORITY = 19
_LONG_S = 0.5  # a job that may have taken megabytes

Advance = tuple[int, Sequence[int], Sequence[int]]
"""What one step brought to a text: its id, the tokens, the drafts behind them."""


class Job(ABC):
    """Something to be done once. Its results are there when `GrammarBackend.receive` has returned it."""

    began_s: float | None = None
    """When it began, monotonic; set by the thread that does it."""
    error: RayppError | None = None
    is_done = is_given_up = False
    thread_id = 0  # of the system, of the thread that does it

    def run(self, vocabulary: Callable[[], Vocabulary]) -> None:
        """Do it; what goes wrong is its `error`."""
        try:
            self.do(vocabulary)
        except RayppError as error:
            self.error = error
        except BaseException as error:  # a panic of llguidance is no Exception
            got = f"{type(error).__name__}: {error}"[:300]
            self.error = RequestError("a grammar cannot be followed", got=got, param="structured_outputs")

    @abstractmethod
    def do(self, vocabulary: Callable[[], Vocabulary]) -> None:
        """Do it, in the thread that is called.

        Raises:
            RayppError: it cannot be done.
        """


class CompileJob(Job):
    """Compile a constraint."""

    compiled: CompiledGrammar | None = None
    """None if there is an error."""

    def __init__(self, source: str) -> None:
        """Compile a constraint, `structured_outputs.source_of`."""
        self.source = source

    def do(self, vocabulary: Callable[[], Vocabulary]) -> None:
        """Compile it; the time until there is a vocabulary does not count."""
        loaded = vocabulary()
        self.began_s = time.monotonic()
        self.compiled = compile_constraint(self.source, loaded)


class GrammarCompileJob(CompileJob):
    """The same for what a user wrote as a grammar, or may have: that can take llguidance minutes."""


class MaskJob(Job):
    """Go on with a text, and make the masks behind it. A text is in one such job at a time."""

    after_step = NO_STEP
    num_accepted = 0
    draft_ids: Sequence[int] = ()
    bitmasks: Int32s = NO_INT32S  # [1 + drafts, W], see `TextGrammar.masks`
    took_s = 0.0

    def __init__(self, text: TextGrammar, advances: Sequence[Advance]) -> None:
        """Go on by what steps brought, at least one; the masks are for behind the last one's tokens."""
        self.submitted_s = time.monotonic()
        self._text, self._advances = text, advances

    def do(self, vocabulary: Callable[[], Vocabulary]) -> None:
        """Make the masks."""
        self.began_s = time.monotonic()
        for _, token_ids, _ in self._advances:
            self._text.accept(token_ids)
        self.after_step, _, draft_ids = self._advances[-1]
        self.draft_ids, self.bitmasks = self._text.masks(draft_ids)
        self.num_accepted = self._text.num_accepted
        self.took_s = time.monotonic() - self.began_s


class SlowMaskJob(MaskJob):
    """The same under a constraint whose last masks took long."""


class GrammarBackend(Protocol):
    """Does jobs. For one thread."""

    def submit(self, job: Job) -> None:
        """Have a job done. Does not wait for it, and raises nothing."""

    def receive(self) -> list[Job]:
        """Return the jobs that were done since the last call."""

    def give_up(self, job: Job) -> None:
        """Wait no longer for a job that has begun; `receive` may still return it, some day."""

    def fileno(self) -> int | None:
        """Return what a poller finds readable when there is something to receive, the same all the time; or None."""

    def close(self) -> None:
        """End the threads that were not given up."""


class _Pool:
    """The threads for one kind of jobs. The counts are the driver's: no thread of a pool touches them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.jobs: SimpleQueue[Job | None] = SimpleQueue()
        self.threads: list[threading.Thread] = []  # that were not given up
        self.num_given_up = 0


class GrammarThreads:
    """A `GrammarBackend`. The vocabulary is loaded in a thread from the beginning on, jobs wait for it."""

    def __init__(self, source: VocabularySource) -> None:
        """Begin to load a vocabulary; make this before anything runs that must not stand still for a second."""
        num_makers = min(max(2, (os.cpu_count() or 1) // 2), _MAX_MASK_MAKERS)
        sizes: dict[type[Job], int] = {
            CompileJob: MAX_COMPILERS,
            GrammarCompileJob: MAX_COMPILERS,
            MaskJob: num_makers,
            SlowMaskJob: _NUM_SLOW_MAKERS,
        }
        self._pools = {kind: _Pool(size) for kind, size in sizes.items()}
        self._done: deque[Job] = deque()
        self._lock = threading.Lock()  # of what jobs have become, and of the descriptor
        self._descriptor: int | None = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._vocabulary: Future[Vocabulary] = Future()
        self._loader = threading.Thread(target=self._load, args=(source,), name="vocabulary", daemon=True)
        self._loader.start()

    def submit(self, job: Job) -> None:
        """Have a job done."""
        pool = self._pools[type(job)]
        pool.jobs.put(job)
        self._fill(pool)

    def receive(self) -> list[Job]:
        """Return the jobs that were done."""
        if self._descriptor is not None:
            with suppress(BlockingIOError):
                os.eventfd_read(self._descriptor)
        done = list[Job]()
        while self._done:
            done.append(job := self._done.popleft())
            self._pools[type(job)].num_given_up -= job.is_given_up
        return done

    def give_up(self, job: Job) -> None:
        """Have another thread take the place of the one that does a job."""
        with self._lock:
            if job.is_done or job.is_given_up:
                return
            job.is_given_up = True
        pool = self._pools[type(job)]
        pool.threads = [thread for thread in pool.threads if thread.native_id != job.thread_id]
        pool.num_given_up += 1
        with suppress(OSError):  # it has just ended
            os.setpriority(os.PRIO_PROCESS, job.thread_id, _LOWEST_PRIORITY)
        self._fill(pool)

    def fileno(self) -> int | None:
        """Return the descriptor to wait for."""
        return self._descriptor

    def close(self) -> None:
        """Begin no job any more; wait a moment for those that have begun, and for the vocabulary."""
        ends_s = time.monotonic() + _END_TIMEOUT_S
        for pool in self._pools.values():
            with suppress(Empty):
                while True:
                    pool.jobs.get_nowait()
            for _ in pool.threads:
                pool.jobs.put(None)
        for thread in [self._loader, *(thread for pool in self._pools.values() for thread in pool.threads)]:
            thread.join(max(ends_s - time.monotonic(), 0.0))
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
            self._descriptor = None

    def _fill(self, pool: _Pool) -> None:
        """Start the threads that a pool lacks, as far as it may have them; without any, its jobs fail."""
        while len(pool.threads) < min(pool.size, 2 * pool.size - pool.num_given_up):
            thread = threading.Thread(target=self._work, args=(pool,), name="grammars", daemon=True)
            usual = threading.stack_size(_STACK_BYTES)
            try:
                thread.start()
            except RuntimeError:  # the system lets it have no more
                break
            finally:
                threading.stack_size(usual)
            pool.threads.append(thread)
        if not pool.threads:
            with suppress(Empty):
                while True:
                    job = pool.jobs.get_nowait()
                    if job is not None:
                        job.error = _none_left(pool.num_given_up)
                        self._done.append(job)
            self._wake()

    def _work(self, pool: _Pool) -> None:
        """Do jobs until there is None, or this thread is given up."""
        while True:
            try:
                job = pool.jobs.get_nowait()
            except Empty:
                self._wake()
                job = pool.jobs.get()
            if job is None:
                return
            job.thread_id = threading.get_native_id()
            began_s = time.monotonic()
            job.run(self._loaded)
            if time.monotonic() - began_s > _LONG_S:
                _trim_memory()
            with self._lock:
                job.is_done = True
            self._done.append(job)
            if job.is_given_up:
                self._wake()
                return

    def _wake(self) -> None:
        """Have the driver look for what is done, if anything is. Masks of a step are done at nearly the same time."""
        with self._lock:
            if self._done and self._descriptor is not None:
                os.eventfd_write(self._descriptor, 1)

    def _load(self, source: VocabularySource) -> None:
        try:
            self._vocabulary.set_result(source.load())
        except BaseException as error:  # the jobs that need it fail with it
            self._vocabulary.set_exception(error)

    def _loaded(self) -> Vocabulary:
        """Return the vocabulary once it is there.

        Raises:
            RequestError: there is none.
        """
        try:
            return self._vocabulary.result(_LOAD_TIMEOUT_S)
        except TimeoutError:
            raise RequestError(
                "this engine cannot serve structured_outputs now",
                got=f"a tokenizer that was not loaded within {_LOAD_TIMEOUT_S:g} s",
                hint="look whether the disk with the model answers, and send the request again",
                param="structured_outputs",
            ) from None


def _trim_memory() -> None:
    """Give free memory back to the system. glibc keeps it, for each thread apart; other C libraries do not."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def _none_left(num_given_up: int) -> RequestError:
    return RequestError(
        "no thread is left to compile grammars or to make masks in",
        got=f"{num_given_up} threads that take longer than they may, and none beside them",
        hint="send the request again later; other requests' grammars or a limit on the number of threads are at fault",
    )

"""The requests under a grammar: held back until it is compiled, begun when they get a row, continued after each step.

    add --> CompileJob ... it is done --> scheduler ... a row --> MaskJob ... it is done --> masks to the last stage
                                                          |
                       StepResult --> tokens, next drafts --> MaskJob ... it is done --> masks to the last stage

The driver never waits for a grammar. What comes late costs its own request a step, see `raypp.messages.MaskUpdate`. A
turn costs nothing for requests that wait: whatever is done is done for those that something happened to.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import takewhile
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from raypp.errors import RayppError, RequestError
from raypp.grammar.compile import CompiledGrammar, kind_and_value, refused
from raypp.grammar.grammar_threads import (
    MAX_COMPILERS,
    Advance,
    CompileJob,
    GrammarBackend,
    GrammarCompileJob,
    MaskJob,
    SlowMaskJob,
)
from raypp.grammar.text_grammar import TextGrammar
from raypp.messages import NO_INT32S, NO_STEP, MaskUpdate, int32s
from raypp.request import Request, RequestUpdate
from raypp.structured_outputs import source_of

_MAX_KEPT_BYTES = 512 << 20
"""Of compiled grammars; the one used last is kept in any case."""
MASK_TIMEOUT_S = 20.0
"""A mask takes microseconds. One that takes this long is of a grammar that grows worse with every token."""
_SLOW_S = 0.005
"""Masks under a constraint whose last ones took longer are made apart from others."""
_ADMITTED_AT_ONCE = 64
"""Requests that `poll` says may run: thousands may wait for the same grammar."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class Constraint:
    """What the texts of unfinished requests share."""

    key: str
    value: Mapping[str, Any]  # `SamplingParams.structured_outputs`
    is_queued: bool = False  # to be compiled, or being so
    is_slow: bool = False  # whether the newest masks of one of its texts took long
    waiting: dict[_Text, None] = field(default_factory=dict)  # texts that can go on once it is compiled


@dataclass(eq=False, slots=True)
class _Text:
    """A request and what is known of its grammar."""

    request: Request
    constraint: Constraint
    is_admitted: bool = False
    grammar: TextGrammar | None = None  # once it has a row and a compiled constraint
    job: MaskJob | None = None  # that goes on with the grammar
    waiting: list[Advance] = field(default_factory=list)  # for the next one
    row: int = -1
    start_step: int = NO_STEP
    latest: MaskJob | None = None  # with the newest masks


class Constraints:
    """All constraints of unfinished requests, and compiled ones of others."""

    def __init__(self, backend: GrammarBackend, timeout_s: float) -> None:
        """Know none yet.

        Args:
            backend: Compiles them.
            timeout_s: What one may take, seconds.
        """
        self._backend = backend
        self._timeout_s = timeout_s
        self._by_key: WeakValueDictionary[str, Constraint] = WeakValueDictionary()  # while texts or queues hold them
        self._queue: deque[Constraint] = deque()
        self._compiling: dict[CompileJob, Constraint] = {}
        self._kept: OrderedDict[str, CompiledGrammar] = OrderedDict()  # by key, the last used ones last
        self._num_kept_bytes = 0

    def join(self, value: Mapping[str, Any]) -> Constraint:
        """Return the constraint of one more text."""
        key = blake2b(source_of(dict(value)).encode(), digest_size=16).hexdigest()
        constraint = self._by_key.get(key)
        if constraint is None:
            constraint = self._by_key[key] = Constraint(key, value)
        elif isinstance(value, dict):
            value.update(constraint.value)  # the same, so that its memory is kept only once
        return constraint

    def compiled(self, constraint: Constraint) -> CompiledGrammar | None:
        """Return the constraint's grammar; None if it has to be compiled, perhaps once more."""
        if constraint.key in self._kept:
            self._kept.move_to_end(constraint.key)
        return self._kept.get(constraint.key)

    def want(self, constraint: Constraint, text: _Text) -> None:
        """Have a constraint compiled that a text needs; `compile_next` has to follow."""
        constraint.waiting[text] = None
        if not constraint.is_queued:
            constraint.is_queued = True
            self._queue.append(constraint)

    def compile_next(self) -> None:
        """Have as many constraints compiled as are at a time."""
        while self._queue and len(self._compiling) < MAX_COMPILERS:
            constraint = self._queue.popleft()
            if constraint.waiting:
                source = source_of(dict(constraint.value))
                job = (GrammarCompileJob if "grammar" in constraint.value else CompileJob)(source)
                self._compiling[job] = constraint
                self._backend.submit(job)
            else:
                constraint.is_queued = False

    def take(self, job: CompileJob) -> list[_Text]:
        """Take in what a job has brought; return the texts that waited for that."""
        constraint = self._compiling.pop(job, None)
        if constraint is None:  # it was given up
            return []
        if job.compiled is not None:
            self._keep(constraint.key, job.compiled)
        return self._release(constraint)

    def take_late(self) -> list[tuple[list[_Text], RayppError]]:
        """Give up the jobs that are over their time; return the texts that waited for each, and why they do in vain."""
        now_s = time.monotonic()
        late = [job for job in self._compiling if job.began_s is not None and now_s - job.began_s > self._timeout_s]
        given_up = list[tuple[list[_Text], RayppError]]()
        for job in late:
            self._backend.give_up(job)
            kind, _ = kind_and_value(job.source)
            why = f"compiling it takes longer than grammar_compile_timeout_s = {self._timeout_s:g}"
            given_up.append((self._release(self._compiling.pop(job)), refused(kind, why)))
        return given_up

    def _release(self, constraint: Constraint) -> list[_Text]:
        """Return the texts that waited for a constraint, which is no longer to be compiled."""
        constraint.is_queued = False
        texts, constraint.waiting = list(constraint.waiting), {}
        return texts

    def _keep(self, key: str, compiled: CompiledGrammar) -> None:
        self._kept[key] = compiled
        self._num_kept_bytes += compiled.memory_size_bytes
        while self._num_kept_bytes > _MAX_KEPT_BYTES and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._num_kept_bytes -= oldest.memory_size_bytes


@dataclass(frozen=True)
class GrammarNews:
    """What has become of requests since the last look."""

    admitted: list[Request] = field(default_factory=list)
    refused: list[tuple[Request, RayppError]] = field(default_factory=list)  # of those that were never admitted
    failed: list[tuple[Request, RayppError]] = field(default_factory=list)  # of those that were


class Grammars:
    """Knows every unfinished request under a grammar."""

    def __init__(
        self, backend: GrammarBackend, compile_timeout_s: float, send_masks: Callable[[MaskUpdate], None]
    ) -> None:
        """Know none yet.

        Args:
            backend: Compiles grammars, and makes masks.
            compile_timeout_s: What a constraint may take to compile, seconds.
            send_masks: To the last stage.
        """
        self._backend = backend
        self._send_masks = send_masks
        self.texts: dict[Request, _Text] = {}
        """The unfinished requests under a grammar. While there are none, `poll` has nothing to do unless `fileno` says
        so."""
        self._ready: deque[_Text] = deque()  # to be admitted, closed ones among them
        self._constraints: Constraints = Constraints(backend, compile_timeout_s)
        self._making: dict[MaskJob, _Text] = {}  # the oldest first
        self._news = GrammarNews()
        self.num_held_back = 0
        """Requests whose grammar is not compiled yet."""

    def fileno(self) -> int | None:
        """Return what a poller finds readable when `poll` has something to do; see `GrammarBackend`."""
        return self._backend.fileno()

    def add(self, request: Request) -> bool:
        """Take in a request; return whether it may run. If not, `poll` tells once its grammar is compiled."""
        assert request.params.structured_outputs is not None
        constraint = self._constraints.join(request.params.structured_outputs)
        text = self.texts[request] = _Text(request, constraint)
        is_compiled = self._constraints.compiled(constraint) is not None
        text.is_admitted = is_compiled and not self._ready  # those go first
        if not text.is_admitted:
            self.num_held_back += 1
            if is_compiled:
                self._ready.append(text)
            else:
                self._await_constraint(text)
        return text.is_admitted

    def is_held_back(self, request: Request) -> bool:
        """Return whether the request's grammar is not compiled yet."""
        return request in self.texts and not self.texts[request].is_admitted

    def close(self, request: Request) -> None:
        """Forget a request; one without a grammar is none that was known."""
        text = self.texts.pop(request, None)
        if text is None:
            return
        self.num_held_back -= not text.is_admitted
        text.constraint.waiting.pop(text, None)
        if text.job is not None:
            del self._making[text.job]

    def note_started(self, request: Request, row: int, step_id: int) -> None:
        """Say that a request takes a row over with a step, for the first time or after a preemption."""
        if (text := self.texts.get(request)) is not None:
            text.row, text.start_step = row, step_id
            if text.grammar is not None:
                self._tell_stage([text])
            else:
                self._open(text)

    def note_step(self, step_id: int, updates: Sequence[RequestUpdate]) -> None:
        """Take in what a step brought."""
        for update in updates:
            if update.draft_ids is None or (text := self.texts.get(update.request)) is None:
                continue
            if update.finish_reason:
                self.close(text.request)
            elif text.grammar is not None:  # else it will be opened with all tokens that it has then
                self._go_on(text, text.grammar, (step_id, update.new_token_ids, update.draft_ids))

    def poll(self) -> GrammarNews:
        """Take in what was done, and send it on; return what has become of requests."""
        fresh: list[_Text] = []
        for job in self._backend.receive():
            if isinstance(job, MaskJob):
                fresh += self._take_masks(job)
            elif isinstance(job, CompileJob):
                self._take_compiled(job)
        if self.texts:  # what was begun for requests that have left ends by itself, or is given up for the next one
            self._tell_stage(fresh)
            self._check_time()
            self._constraints.compile_next()
            self._admit_next()
        news, self._news = self._news, GrammarNews()
        return news

    def stop(self) -> None:
        """End the backend."""
        self._backend.close()

    def _await_constraint(self, text: _Text) -> None:
        """Have a text admitted, or opened, once its constraint is compiled."""
        self._constraints.want(text.constraint, text)
        self._constraints.compile_next()

    def _take_compiled(self, job: CompileJob) -> None:
        for text in self._constraints.take(job):
            if job.error is not None:
                self._refuse(text, job.error)
            elif text.is_admitted:
                self._open(text)
            else:
                self._ready.append(text)

    def _admit_next(self) -> None:
        """Let some of those run whose grammar is compiled; the others in later calls."""
        while self._ready and len(self._news.admitted) < _ADMITTED_AT_ONCE:
            text = self._ready.popleft()
            if text.request in self.texts:
                text.is_admitted = True
                self.num_held_back -= 1
                self._news.admitted.append(text.request)

    def _open(self, text: _Text) -> None:
        """Have the masks of a text made that has a row."""
        compiled = self._constraints.compiled(text.constraint)
        if compiled is None:  # few are kept that are not used
            self._await_constraint(text)
            return
        text.grammar = TextGrammar(compiled, text.request.params.allowed_token_ids)
        self._go_on(text, text.grammar, (NO_STEP, list(text.request.output_token_ids), ()))

    def _go_on(self, text: _Text, grammar: TextGrammar, *advances: Advance) -> None:
        """Go on with a text once the job is done that does so now."""
        text.waiting += advances
        if text.job is None and text.waiting:
            text.job = (SlowMaskJob if text.constraint.is_slow else MaskJob)(grammar, text.waiting)
            text.waiting = []
            self._making[text.job] = text
            self._backend.submit(text.job)

    def _take_masks(self, job: MaskJob) -> list[_Text]:
        """Take in a text's masks; return the text if it has any."""
        text = self._making.pop(job, None)
        if text is None or text.grammar is None:  # it was closed
            return []
        text.job = None
        if job.error is not None:
            self._refuse(text, job.error)
            return []
        text.latest, text.constraint.is_slow = job, job.took_s > _SLOW_S
        self._go_on(text, text.grammar)
        return [text]

    def _tell_stage(self, texts: Sequence[_Text]) -> None:
        by_row: dict[int, _Text] = {}
        for text in texts:
            # A row's old owner may still be on its way out.
            if text.start_step != NO_STEP and by_row.get(text.row, text).start_step <= text.start_step:
                by_row[text.row] = text
        told = [(text, text.latest) for text in by_row.values() if text.latest is not None]
        if not told:
            return
        drafts = [token_id for _, masks in told for token_id in masks.draft_ids]
        self._send_masks(
            MaskUpdate(
                rows=int32s([text.row for text, _ in told]),
                moments=np.array([_moment(text, latest) for text, latest in told], np.int64),
                draft_ids=int32s(drafts) if drafts else NO_INT32S,
                bitmasks=np.concatenate([masks.bitmasks for _, masks in told]),
            )
        )

    def _refuse(self, text: _Text, error: RayppError) -> None:
        (self._news.failed if text.is_admitted else self._news.refused).append((text.request, error))
        self.close(text.request)

    def _check_time(self) -> None:
        """Give up what takes too long."""
        for texts, error in self._constraints.take_late():
            for text in texts:
                self._refuse(text, error)
        now_s = time.monotonic()
        for job, text in [*takewhile(lambda made: now_s - made[0].submitted_s > MASK_TIMEOUT_S, self._making.items())]:
            if job.began_s is not None and now_s - job.began_s > MASK_TIMEOUT_S:  # else it waits for another one's
                self._backend.give_up(job)
                self._refuse(text, _too_slow(now_s - job.began_s, len(text.request.output_token_ids)))


def _moment(text: _Text, latest: MaskJob) -> tuple[int, int, int, int]:
    """Return what masks are for, in the order of `MaskMoment`."""
    # The request's own tokens from before the row took it over count as that step's.
    after_step = max(latest.after_step, text.start_step - 1)
    position = len(text.request.prompt_token_ids) + latest.num_accepted
    return text.start_step, after_step, position, len(latest.bitmasks)


def _too_slow(took_s: float, num_tokens: int) -> RequestError:
    return RequestError(
        "a grammar takes too long to compute masks for",
        got=f"no mask within {took_s:.0f} s, after {num_tokens} tokens",
        expected=f"at most {MASK_TIMEOUT_S:g} s",
        hint="a grammar with many ways to read the same text grows slow; write it without",
        param="structured_outputs",
    )

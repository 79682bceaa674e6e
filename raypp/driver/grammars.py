"""The requests under a grammar: held back until it is compiled, begun when they get a row, told about each step.

    add --> CompileJob ... it is done --> scheduler ... a row --> MaskJob ... it is done --> masks to the last stage
                                                          |
                       StepResult --> tokens, next drafts --> MaskJob ... it is done --> masks to the last stage

The driver never waits for a grammar. What comes late costs its own request a step, see `raypp.messages.MaskUpdate`. A
turn costs nothing for requests that wait: whatever is done is done for those that something happened to.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from raypp.driver.constraints import Constraint, Constraints
from raypp.errors import RayppError, RequestError
from raypp.grammar.grammar_threads import Advance, CompileJob, GrammarBackend, MaskJob, SlowMaskJob
from raypp.grammar.text_grammar import TextGrammar
from raypp.messages import NO_INT32S, NO_STEP, Int32s, MaskUpdate
from raypp.request import Request, RequestUpdate

MASK_TIMEOUT_S = 20.0
"""A mask takes microseconds. One that takes this long is of a grammar that grows worse with every token."""

_SLOW_S = 0.005
"""Masks under a constraint whose last ones took longer are made apart from others."""

_ADMITTED_AT_ONCE = 64
"""Requests that `poll` says may run: thousands may wait for the same grammar."""


@dataclass(eq=False, slots=True)
class _Text:
    """A request and what is known of its grammar."""

    request: Request
    constraint: Constraint[_Text]
    is_admitted: bool = False
    grammar: TextGrammar | None = None  # once it has a row and a compiled constraint
    job: MaskJob | None = None  # that goes on with the grammar
    waiting: list[Advance] = field(default_factory=list)  # for the next one
    row: int = -1
    start_step: int = NO_STEP
    latest: MaskJob | None = None  # whose masks are the newest


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
        self._texts: dict[Request, _Text] = {}
        self._ready: deque[_Text] = deque()  # to be admitted, closed ones among them
        self._constraints: Constraints[_Text] = Constraints(backend, compile_timeout_s)
        self._making: dict[MaskJob, _Text] = {}  # the oldest first
        self._news = GrammarNews()
        self._num_held_back = 0

    @property
    def num_held_back(self) -> int:
        """Requests whose grammar is not compiled yet."""
        return self._num_held_back

    @property
    def num_texts(self) -> int:
        """Unfinished requests under a grammar."""
        return len(self._texts)

    def fileno(self) -> int | None:
        """Return what a poller finds readable when `poll` has something to do; see `GrammarBackend`."""
        return self._backend.fileno()

    def add(self, request: Request) -> bool:
        """Take in a request; return whether it may run. If not, `poll` tells once its grammar is compiled."""
        assert request.params.structured_outputs is not None
        constraint = self._constraints.join(request.params.structured_outputs)
        text = self._texts[request] = _Text(request, constraint)
        is_compiled = self._constraints.compiled(constraint) is not None
        text.is_admitted = is_compiled and not self._ready  # nobody overtakes those
        if not text.is_admitted:
            self._num_held_back += 1
            if is_compiled:
                self._ready.append(text)
            else:
                self._await_constraint(text)
        return text.is_admitted

    def is_held_back(self, request: Request) -> bool:
        """Return whether the request's grammar is not compiled yet."""
        return request in self._texts and not self._texts[request].is_admitted

    def close(self, request: Request) -> None:
        """Forget a request; one without a grammar is none that was known."""
        text = self._texts.pop(request, None)
        if text is None:
            return
        self._num_held_back -= not text.is_admitted
        self._constraints.leave(text.constraint, text)
        if text.job is not None:
            del self._making[text.job]

    def note_started(self, request: Request, row: int, step_id: int) -> None:
        """Say that a request takes a row over with a step, for the first time or after a preemption."""
        if (text := self._texts.get(request)) is not None:
            text.row, text.start_step = row, step_id
            if text.grammar is not None:
                self._tell_stage([text])
            else:
                self._open(text)

    def note_step(self, step_id: int, updates: Sequence[RequestUpdate]) -> None:
        """Take in what a step brought."""
        for update in updates:
            if update.draft_ids is None or (text := self._texts.get(update.request)) is None:
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
        self._tell_stage(fresh)
        self._check_time()
        self._constraints.compile_next()
        self._admit_next()
        news, self._news = self._news, GrammarNews()
        return news

    def stop(self) -> None:
        """End whoever follows the grammars."""
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
            if text.request in self._texts:
                text.is_admitted = True
                self._num_held_back -= 1
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
                rows=_int32s([text.row for text, _ in told]),
                moments=np.array([_moment(text, latest) for text, latest in told], np.int64),
                draft_ids=_int32s(drafts) if drafts else NO_INT32S,
                bitmasks=np.concatenate([masks.bitmasks for _, masks in told]),
            )
        )

    def _refuse(self, text: _Text, error: RayppError) -> None:
        (self._news.failed if text.is_admitted else self._news.refused).append((text.request, error))
        self.close(text.request)

    def _refuse_all(self, texts: Iterable[_Text], error: RayppError) -> None:
        for text in texts:
            self._refuse(text, error)

    def _check_time(self) -> None:
        """Give up what takes too long."""
        for texts, error in self._constraints.take_late():
            self._refuse_all(texts, error)
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


def _int32s(values: Sequence[int]) -> Int32s:
    return np.array(values, np.int32)


def _too_slow(took_s: float, num_tokens: int) -> RequestError:
    return RequestError(
        "a grammar takes too long to compute masks for",
        got=f"no mask within {took_s:.0f} s, after {num_tokens} tokens",
        expected=f"at most {MASK_TIMEOUT_S:g} s",
        hint="a grammar with many ways to read the same text grows slow; write it without",
        param="structured_outputs",
    )

"""The requests under a grammar: held back until it is compiled, opened when they get a row, told about each step.

    add --> CompileGrammar ... Compiled --> scheduler ... a row --> OpenGrammar ... GrammarMasks --> masks to last stage
                                                            |
                      StepResult --> tokens, next drafts --> GrammarAdvance ... GrammarMasks --> masks to the last stage

The driver never waits for a grammar. What comes late costs its own request a step, see `raypp.messages.MaskUpdate`. A
turn costs nothing for requests that wait: whatever is done is done for those that something happened to.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from raypp.driver.constraints import Constraint, Constraints
from raypp.driver.grammar_faults import (
    ANSWER_TIMEOUT_S,
    MASK_TIMEOUT_S,
    MAX_DEATHS,
    RestartLimit,
    died_over_it,
    never_answered,
    not_started,
    too_slow,
)
from raypp.driver.grammar_process import GrammarBackend, GrammarProcessDied, GrammarProcessNotStarted
from raypp.errors import RayppError
from raypp.grammar.grammar_messages import (
    CloseGrammar,
    Compiled,
    GrammarAdvance,
    GrammarMasks,
    NotCompiled,
    OpenGrammar,
    Ready,
    Refused,
    Unknown,
)
from raypp.messages import NO_INT32S, NO_STEP, Int32s, MaskUpdate
from raypp.scheduler.request import Request, RequestUpdate

_ADMITTED_AT_ONCE = 64
"""Requests that `poll` says may run: thousands may wait for the same grammar."""

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _LatestMasks:
    after_step: int
    num_accepted: int
    draft_ids: Int32s
    bitmasks: Int32s


@dataclass(eq=False, slots=True)
class _Text:
    """A request and what is known of its grammar."""

    number: int
    request: Request
    constraint: Constraint[_Text]
    is_admitted: bool = False
    is_open: bool = False
    row: int = -1
    start_step: int = NO_STEP
    latest: _LatestMasks | None = None
    num_deaths: int = 0  # of processes that were making its mask


@dataclass(frozen=True)
class GrammarNews:
    """What has become of requests since the last look."""

    admitted: list[Request] = field(default_factory=list)
    refused: list[tuple[Request, RayppError]] = field(default_factory=list)  # of those that were never admitted
    failed: list[tuple[Request, RayppError]] = field(default_factory=list)  # of those that were


class Grammars:
    """Knows every unfinished request under a grammar."""

    def __init__(self, backend: GrammarBackend, send_masks: Callable[[MaskUpdate], None]) -> None:
        """Know none yet.

        Args:
            backend: Follows the grammars.
            send_masks: To the last stage.
        """
        self._backend = backend
        self._send_masks = send_masks
        self._answer_timeout_s = backend.compile_timeout_s + ANSWER_TIMEOUT_S
        self._texts: dict[Request, _Text] = {}
        self._by_number: dict[int, _Text] = {}
        self._started: dict[_Text, None] = {}  # those that have had a row
        self._ready: deque[_Text] = deque()  # to be admitted, closed ones among them
        self._constraints: Constraints[_Text] = Constraints(backend)
        self._awaiting: dict[_Text, float] = {}  # masks, and since when, monotonic; the oldest first
        self._is_starting = True  # nobody is late while the process is not there
        self._is_held_up = False  # whether the process may still make masks that nobody wants any more
        self._limit = RestartLimit()
        self._news = GrammarNews()
        self._num_opened = self._num_held_back = 0

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
        self._num_opened += 1
        assert request.params.structured_outputs is not None
        constraint = self._constraints.join(request.params.structured_outputs)
        text = _Text(self._num_opened, request, constraint)
        self._texts[request] = self._by_number[text.number] = text
        text.is_admitted = constraint.is_compiled and not self._ready  # nobody overtakes those
        if not text.is_admitted:
            self._num_held_back += 1
            if constraint.is_compiled:
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
        del self._by_number[text.number]
        self._num_held_back -= not text.is_admitted
        self._started.pop(text, None)
        self._awaiting.pop(text, None)
        self._constraints.leave(text.constraint, text)
        if text.is_open:
            self._backend.send(CloseGrammar(text.number))

    def note_started(self, request: Request, row: int, step_id: int) -> None:
        """Say that a request takes a row over with a step, for the first time or after a preemption."""
        if (text := self._texts.get(request)) is not None:
            text.row, text.start_step = row, step_id
            self._started[text] = None
            if text.is_open:
                self._tell_stage([text])
            else:
                self._open(text)

    def note_step(self, step_id: int, updates: Sequence[RequestUpdate]) -> None:
        """Take in what a step brought."""
        told = [
            (text, update)
            for update in updates
            if update.draft_ids is not None and (text := self._texts.get(update.request)) is not None
        ]
        for text, update in told:
            if update.finish_reason:
                self.close(text.request)
        # Who is opened later is opened with all tokens that it has then.
        told = [(text, update) for text, update in told if text.is_open and not update.finish_reason]
        if not told:
            return
        now_s = time.monotonic()
        for text, _ in told:
            self._awaiting.setdefault(text, now_s)
        entries, token_ids, draft_ids = list[tuple[int, int, int]](), list[int](), list[int]()
        for text, update in told:
            drafts = update.draft_ids or ()
            entries.append((text.number, len(update.new_token_ids), len(drafts)))
            token_ids += update.new_token_ids
            draft_ids += drafts
        self._backend.send(GrammarAdvance(step_id, np.array(entries, np.int32), _int32s(token_ids), _int32s(draft_ids)))

    def poll(self) -> GrammarNews:
        """Take in what the grammars allow, and send it on; return what has become of requests."""
        fresh: list[_Text] = []
        for event in self._backend.receive():
            match event:
                case GrammarMasks():
                    fresh += self._take_masks(event)
                case Compiled(key):
                    self._go_on(self._constraints.take_compiled(key))
                case NotCompiled(key, error):
                    self._refuse_all(self._constraints.take_failed(key), error)
                case Refused(number, error):
                    if (text := self._by_number.get(number)) is not None:
                        self._refuse(text, error)
                case Unknown(number):
                    self._note_unknown(number)
                case Ready():
                    self._reset_clocks()
                case GrammarProcessDied(computing):
                    logger.warning("the grammar process died; %d texts begin again", len(self._started))
                    self._note_death(computing)
                case GrammarProcessNotStarted(reason):
                    for constraint in list(self._constraints.compiling):
                        self._refuse_all(self._constraints.take_failed(constraint), not_started(reason))
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
        if (error := self._limit.error()) is not None:
            self._refuse_all(self._constraints.take_all(), error)
        self._constraints.compile_next()

    def _go_on(self, texts: Sequence[_Text]) -> None:
        """Go on with texts whose constraint is compiled."""
        for text in texts:
            if text.is_admitted:
                self._open(text)
            else:
                self._ready.append(text)

    def _admit_next(self) -> None:
        """Let some of those run whose grammar is compiled; the others in later calls."""
        while self._ready and len(self._news.admitted) < _ADMITTED_AT_ONCE:
            text = self._ready.popleft()
            if text.number in self._by_number:
                text.is_admitted = True
                self._num_held_back -= 1
                self._news.admitted.append(text.request)

    def _note_unknown(self, number: int) -> None:
        """Have a constraint compiled that the process no longer keeps."""
        if (text := self._by_number.get(number)) is not None:
            text.is_open = text.constraint.is_compiled = False
            self._awaiting.pop(text, None)
            self._await_constraint(text)

    def _open(self, text: _Text) -> None:
        """Have the masks of a text made that has a row."""
        if not text.constraint.is_compiled:
            self._await_constraint(text)
            return
        request, text.is_open = text.request, True
        allowed = request.params.allowed_token_ids
        self._awaiting[text] = time.monotonic()
        self._backend.send(
            OpenGrammar(
                text.number,
                text.constraint.key,
                None if allowed is None else list(allowed),
                list(request.output_token_ids),
            )
        )

    def _take_masks(self, masks: GrammarMasks) -> list[_Text]:
        fresh, first = [], 0
        for index, (number, after_step, num_accepted, num_masks) in enumerate(masks.entries.tolist()):
            end = first + num_masks
            text = self._by_number.get(number)
            if text is not None:
                drafts, bitmasks = masks.draft_ids[first - index : end - index - 1], masks.bitmasks[first:end]
                text.latest = _LatestMasks(after_step, num_accepted, drafts, bitmasks)
                self._awaiting.pop(text, None)
                fresh.append(text)
            first = end
        return fresh

    def _tell_stage(self, texts: Sequence[_Text]) -> None:
        by_row: dict[int, _Text] = {}
        for text in texts:
            # A row's old owner may still be on its way out.
            if text.start_step != NO_STEP and by_row.get(text.row, text).start_step <= text.start_step:
                by_row[text.row] = text
        told = [(text, text.latest) for text in by_row.values() if text.latest is not None]
        if not told:
            return
        drafts = [m.draft_ids for _, m in told if len(m.draft_ids)]
        self._send_masks(
            MaskUpdate(
                rows=_int32s([text.row for text, _ in told]),
                moments=np.array([_moment(text, latest) for text, latest in told], np.int64),
                draft_ids=np.concatenate(drafts) if drafts else NO_INT32S,
                bitmasks=np.concatenate([m.bitmasks for _, m in told]),
            )
        )

    def _refuse(self, text: _Text, error: RayppError) -> None:
        (self._news.failed if text.is_admitted else self._news.refused).append((text.request, error))
        self.close(text.request)

    def _refuse_all(self, texts: Sequence[_Text], error: RayppError) -> None:
        for text in texts:
            self._refuse(text, error)

    def _check_time(self) -> None:
        """Give up on what takes too long, and on a process that no longer answers."""
        if self._is_starting:
            return
        now_s, compiling = time.monotonic(), self._constraints.compiling
        if now_s - next(iter(self._awaiting.values()), now_s) > MASK_TIMEOUT_S:
            self._note_late_mask()
        elif now_s - next(iter(compiling.values()), now_s) > self._answer_timeout_s:
            for constraint in list(compiling):
                constraint.num_failures += 1
                if constraint.num_failures > 1:
                    error = never_answered(self._answer_timeout_s)
                    self._refuse_all(self._constraints.take_failed(constraint), error)
            self._restart()
        elif self._is_held_up and not self._started and not compiling:
            self._is_held_up = False
            if self._backend.computing():
                self._begin_again()

    def _note_late_mask(self) -> None:
        """Refuse the texts whose masks take too long; if there are none, the process itself is at fault."""
        slow = [(number, took_s) for number, took_s in self._backend.computing() if took_s > MASK_TIMEOUT_S / 2]
        culprits = [(text, took_s) for number, took_s in slow if (text := self._by_number.get(number)) is not None]
        for text, took_s in culprits:
            self._refuse(text, too_slow(took_s, len(text.request.output_token_ids)))
        if culprits:
            self._is_held_up = True
            self._reset_clocks()  # the others may only have waited for these
        else:
            self._restart()

    def _note_death(self, computing: Sequence[int]) -> None:
        for number in computing:
            if (text := self._by_number.get(number)) is not None:
                text.num_deaths += 1
                if text.num_deaths > MAX_DEATHS:
                    self._refuse(text, died_over_it(text.num_deaths))
        self._restart()

    def _restart(self) -> None:
        """Begin again since the process failed; no more than some times."""
        self._limit.note()
        self._begin_again()

    def _begin_again(self) -> None:
        """Begin the texts that have a row again, in a new process."""
        self._backend.restart()
        self._is_starting, self._is_held_up = True, False
        self._awaiting.clear()
        self._constraints.begin_again()
        for text in list(self._started):
            text.is_open = False
            self._await_constraint(text)
        self._constraints.compile_next()

    def _reset_clocks(self) -> None:
        """Count from now on how long answers take."""
        self._is_starting = False
        now_s = time.monotonic()
        self._awaiting = dict.fromkeys(self._awaiting, now_s)
        self._constraints.compiling = dict.fromkeys(self._constraints.compiling, now_s)


def _moment(text: _Text, latest: _LatestMasks) -> tuple[int, int, int, int]:
    """Return what masks are for, in the order of `MaskMoment`."""
    # The request's own tokens from before the row took it over count as that step's.
    after_step = max(latest.after_step, text.start_step - 1)
    position = len(text.request.prompt_token_ids) + latest.num_accepted
    return text.start_step, after_step, position, len(latest.bitmasks)


def _int32s(values: Sequence[int]) -> Int32s:
    return np.array(values, np.int32)

"""Which request kills engines: one that does must not take all others with it, again and again.

A death counts against the requests that were in a step and have had no token since they were handed to that engine.

    1 death     they are handed over together, once others have had tokens: first of all that waits
    2 deaths    on trial: handed over alone, one at a time
    3 deaths    convicted, if the engine has run others since it began, and it is known that it was in a step
    4 deaths    convicted, if that is not known, since the driver died

So at a second death it is clear whom it concerns, and a third one must strike in the moment of one request's trial:
deaths from outside hardly do. Whoever yields a token is free of all suspicion.

A killer that comes soon after each start would still find the same request on trial. So a trial begins only in an
engine that has lived for twice as long as any before it since the first death: such a killer then strikes before. Since
its first death there may thus have been others that cannot be its doing, nor that of another suspect: then there is
another killer, and for each of them it takes one more trial to convict it. Deaths that a convicted request explains are
left out, and those that are known to have another cause. And a request kills the same part each time: only deaths of
one part are counted together when it is convicted.

While nothing shows that the engine can run others, another suspect is tried first. So an engine that can run nothing
convicts nobody, and uses its restarts up. A request that is the only one is convicted all the same.

What a convicted request did counts as one death against the limit of restarts: it is not the engine that is bad.
A trial that ends in a death and convicts nobody yet does not count either.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import NamedTuple

from raypp.errors import FatalRequestError

_DEATHS_BEFORE_TRIAL = 2
_TIMES_AS_OLD = 2.0
_MAX_HOLD_S = 5.0  # how long a trial waits for an engine to be old enough


class Verdict(NamedTuple):
    """What a death says of the requests."""

    convicted: int | None  # handle of the one that kills engines
    num_excused: int  # of the deaths so far, those that are some request's and no sign of a bad engine


class Trials:
    """Counts the deaths of engines by request, and says which requests wait until others have been handed over.

    Requests are named by their handles. While no engine dies it is not asked and keeps nothing.

    Args:
        max_running: The most requests that can have been in a step, where nobody knows which were.
        clock: Monotonic, seconds; for tests.
    """

    def __init__(self, max_running: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_running = max_running
        self._clock = clock
        self._began_s = clock()
        self._age_s = 0.0  # of the last engine, at its death
        self._part: Hashable = None  # what of it died
        self._hold_s = 0.0  # how old an engine has to be for a trial
        self._records: dict[int, set[int]] = {}  # of suspects, the numbers of the deaths that may be their doing
        self._parts: list[Hashable] = []  # what died, by the deaths' numbers: since there are suspects
        self._excused: set[int] = set()  # deaths by number, and so the next
        self._explained: set[int] = set()
        self._tokens_at_start: dict[int, int] = {}  # of requests that the present engine got with tokens
        self._group: list[int] = []  # waiting, to be handed over together
        self._single: deque[int] = deque()  # waiting, each for its trial
        self._under_watch: set[int] = set()  # of these, those that were handed over and have yielded nothing yet
        self._is_trial = False  # whether that is a single one
        self._awaited: set[int] = set()  # others that were in a step at the death and have yielded nothing since
        self._engine_works = False  # a request has had a token since the engine began; kept while suspects are there

    @property
    def are_going_on(self) -> bool:
        """Whether `note_tokens` and `next` want to be called."""
        return bool(self._group or self._single or self._under_watch)

    @property
    def hold_s(self) -> float:
        """How long it is too early for a trial; after that, `next` wants to be called. Seconds; 0: it is not."""
        return max(self._began_s + self._hold_s - self._clock(), 0.0) if self._single else 0.0

    def note_loss(self, part: Hashable) -> None:
        """Take in that the engine died just now; `note_death` follows when it is back.

        Args:
            part: What of it died.
        """
        self._age_s, self._part = self._clock() - self._began_s, part

    def note_death(
        self,
        in_flight: Collection[int] | None,
        num_tokens: Mapping[int, int],
        *,
        is_only_request: bool,
        is_explained: bool = False,
    ) -> Verdict:
        """Take in that an engine ended.

        Args:
            in_flight: The requests that were in a step; None: nobody knows, so those that can have been are meant.
            num_tokens: Of each unfinished request, how many tokens it has; in the order in which they came.
            is_only_request: Whether they are all continuations of one.
            is_explained: Whether it is known that no request did it: a node was lost, or it was ended on purpose.
        """
        watched, was_trial, self._under_watch, self._is_trial = self._under_watch, self._is_trial, set(), False
        waiting = {*self._group, *self._single}
        had = [handle for handle in num_tokens if handle not in waiting]
        silent = [handle for handle in had if num_tokens[handle] == self._tokens_at_start.get(handle, 0)]
        speaking = set(had).difference(silent)
        if is_explained:
            accused, self._awaited = [], set()
        elif in_flight is None:
            accused = silent[: max(self._max_running - len(speaking), 0)]
            self._awaited = speaking
        else:
            accused = [handle for handle in silent if handle in set(in_flight)]
            self._awaited = speaking.intersection(in_flight)
        number = self._count_death(num_tokens.keys() - speaking, is_explained=is_explained)
        if was_trial and (on_trial := watched.intersection(accused)):
            has_evidence, is_sure = self._engine_works or is_only_request, in_flight is not None or is_only_request
            return self._end_trial(on_trial.pop(), number, has_evidence=has_evidence, is_sure=is_sure)
        for handle in sorted(watched.intersection(num_tokens).difference(accused)):  # it was not in a step
            self._put(handle)
        excused_before = len(self._excused)
        for handle in accused:
            deaths = self._records.setdefault(handle, set())
            deaths.add(number)
            if len(deaths) == _DEATHS_BEFORE_TRIAL:
                self._excused.add(number)
            self._put(handle)
        return Verdict(None, len(self._excused) - excused_before)

    def begin(self, num_tokens: Mapping[int, int]) -> list[int]:
        """Return those of the unfinished requests that a new engine gets at once, in order.

        Args:
            num_tokens: Of each, how many tokens it has.
        """
        self._engine_works = False
        self._began_s = self._clock()
        self._tokens_at_start = {handle: count for handle, count in num_tokens.items() if count}
        waiting = {*self._group, *self._single}
        return [handle for handle in num_tokens if handle not in waiting]

    def note_tokens(self, handles: Collection[int]) -> None:
        """Take in that these requests have had tokens."""
        self._engine_works = self._engine_works or bool(handles)
        self._awaited.difference_update(handles)
        self._under_watch.difference_update(handles)

    def next(self, unfinished: Collection[int]) -> list[int]:
        """Return the requests that are handed over now, before all others that wait; none if it is not yet time.

        Args:
            unfinished: All requests that have not ended.
        """
        self._under_watch.intersection_update(unfinished)
        if self._under_watch:
            return []
        self._group = [handle for handle in self._group if handle in unfinished]
        self._single = deque(handle for handle in self._single if handle in unfinished)
        has_others = len(unfinished) > len(self._group) + len(self._single)
        if (has_others and not self._engine_works) or not self._awaited.isdisjoint(unfinished):
            return []
        released, self._is_trial = self._group, False
        if released:
            self._group = []
        elif self._single and not self.hold_s:
            released, self._is_trial = [self._single.popleft()], True
        self._under_watch = set(released)
        return released

    def _count_death(self, suspicious: Collection[int], *, is_explained: bool) -> int:
        """Return the number of a death; forget suspects that are none any more, and with the last one all deaths."""
        self._records = {handle: deaths for handle, deaths in self._records.items() if handle in suspicious}
        if not self._records:
            self._hold_s = 0.0
            self._parts.clear()
            self._excused.clear()
            self._explained.clear()
        else:
            self._hold_s = max(self._hold_s, min(_TIMES_AS_OLD * self._age_s, _MAX_HOLD_S))
        number = len(self._parts)
        self._parts.append(self._part)
        if is_explained:
            self._explained.add(number)
        return number

    def _put(self, handle: int) -> None:
        if len(self._records[handle]) < _DEATHS_BEFORE_TRIAL:
            self._group.append(handle)
        else:
            self._single.append(handle)

    def _end_trial(self, handle: int, number: int, *, has_evidence: bool, is_sure: bool) -> Verdict:
        deaths = self._records.pop(handle) | {number}
        others = set(range(min(deaths), number)).difference(deaths, self._explained, *self._records.values())
        # Where nobody knows what was in a step, it may only have waited for a row or for blocks: for long, among many.
        num_needed = _DEATHS_BEFORE_TRIAL + 1 + len(others) + (not is_sure)
        if has_evidence and max(Counter(self._parts[n] for n in deaths).values()) >= num_needed:
            self._explained |= deaths
            self._hold_s = 0.0  # that was the killer
            excused = deaths.difference(self._excused, {number})
            self._excused |= excused
            return Verdict(handle, len(excused))
        self._records[handle] = deaths
        if not (has_evidence and is_sure):
            self._single.append(handle)
            return Verdict(None, 0)
        self._single.appendleft(handle)  # before other suspects, so that nobody's deaths are mixed up with its own
        self._excused.add(number)
        return Verdict(None, 1)


def conviction(request_id: str) -> FatalRequestError:
    """Return the error that a convicted request ends with."""
    return FatalRequestError(
        "the engine died again and again while it ran this request, and not while it ran others",
        request_id=request_id,
        hint="do not send it again; the log names what died, and of what",
    )

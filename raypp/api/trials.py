"""Which request kills engines: one that does must not take all others with it, again and again.

A death counts against the requests that were in a step and have had no token since they were handed to that engine.

    1 death     they are handed over together, once others have had tokens: first of all that waits
    2 deaths    on trial: handed over alone, one at a time
    3 deaths    convicted, if the engine has run others since it began, and it is known that it was in a step
    4 deaths    convicted, if that is not known, since the driver died

So at a second death it is clear whom it concerns, and a third one must strike in the moment of one request's trial:
deaths from outside hardly do. Whoever yields a token is free of all suspicion.

While nothing shows that the engine can run others, another suspect is tried first. So an engine that can run nothing
convicts nobody, and uses its restarts up. A request that is the only one is convicted all the same.

What a convicted request did counts as one death against the limit of restarts: it is not the engine that is bad.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from typing import NamedTuple

from raypp.errors import FatalRequestError

_DEATHS_BEFORE_TRIAL = 2


class Verdict(NamedTuple):
    """What a death says of the requests."""

    convicted: int | None  # handle of the one that kills engines
    num_excused: int  # of the deaths so far, those that are some request's and no sign of a bad engine


class _Record(NamedTuple):
    num_deaths: int
    num_excused: int


class Trials:
    """Counts the deaths of engines by request, and says which requests wait until others have been handed over.

    Requests are named by their handles. While no engine dies it is not asked and keeps nothing.

    Args:
        max_running: The most requests that can have been in a step, where nobody knows which were.
    """

    def __init__(self, max_running: int) -> None:
        self._max_running = max_running
        self._records: dict[int, _Record] = {}
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

    def note_death(
        self, in_flight: Collection[int] | None, num_tokens: Mapping[int, int], *, is_only_request: bool
    ) -> Verdict:
        """Take in that an engine died of something that may be a request's doing.

        Args:
            in_flight: The requests that were in a step; None: nobody knows, so those that can have been are meant.
            num_tokens: Of each unfinished request, how many tokens it has; in the order in which they came.
            is_only_request: Whether they are all continuations of one.
        """
        watched, was_trial, self._under_watch, self._is_trial = self._under_watch, self._is_trial, set(), False
        waiting = {*self._group, *self._single}
        had = [handle for handle in num_tokens if handle not in waiting]
        silent = [handle for handle in had if num_tokens[handle] == self._tokens_at_start.get(handle, 0)]
        speaking = set(had).difference(silent)
        if in_flight is None:
            accused = silent[: max(self._max_running - len(speaking), 0)]
            self._awaited = speaking
        else:
            accused = [handle for handle in silent if handle in set(in_flight)]
            self._awaited = speaking.intersection(in_flight)
        self._records = {h: r for h, r in self._records.items() if h in num_tokens and h not in speaking}
        if was_trial and (on_trial := watched.intersection(accused)):
            has_evidence, is_sure = self._engine_works or is_only_request, in_flight is not None or is_only_request
            return self._end_trial(on_trial.pop(), has_evidence=has_evidence, is_sure=is_sure)
        for handle in sorted(watched.intersection(num_tokens).difference(accused)):  # it was not in a step
            self._put(handle)
        num_excused = 0
        for handle in accused:
            num_deaths, excused = self._records.get(handle, _Record(0, 0))
            num_deaths += 1
            if num_deaths == _DEATHS_BEFORE_TRIAL:
                num_excused = excused = 1
            self._records[handle] = _Record(num_deaths, excused)
            self._put(handle)
        return Verdict(None, num_excused)

    def begin(self, num_tokens: Mapping[int, int]) -> list[int]:
        """Return those of the unfinished requests that a new engine gets at once, in order.

        Args:
            num_tokens: Of each, how many tokens it has.
        """
        self._engine_works = False
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
        elif self._single:
            released, self._is_trial = [self._single.popleft()], True
        self._under_watch = set(released)
        return released

    def _put(self, handle: int) -> None:
        if self._records[handle].num_deaths < _DEATHS_BEFORE_TRIAL:
            self._group.append(handle)
        else:
            self._single.append(handle)

    def _end_trial(self, handle: int, *, has_evidence: bool, is_sure: bool) -> Verdict:
        num_deaths, num_excused = self._records.pop(handle)
        # Where nobody knows what was in a step, it may only have waited for a row or for blocks: for long, among many.
        if has_evidence and (is_sure or num_deaths > _DEATHS_BEFORE_TRIAL):
            return Verdict(handle, num_deaths - num_excused)
        self._records[handle] = _Record(num_deaths + 1, num_excused)
        self._single.append(handle)
        return Verdict(None, 0)


def conviction(request_id: str) -> FatalRequestError:
    """Return the error that a convicted request ends with."""
    return FatalRequestError(
        "the engine died again and again while it ran this request, and not while it ran others",
        request_id=request_id,
        hint="do not send it again; the log names what died, and of what",
    )

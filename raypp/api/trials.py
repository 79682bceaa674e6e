"""Which request kills engines: a request that does must not take all others with it, again and again.

    suspect     in a step at two deaths, without a token of it in between
    on trial    handed over alone, once others have had tokens, and all that were in a step too; one at a time
    acquitted   it yields a token, or ends
    convicted   the engine dies once more while it is on trial and in a step

A conviction needs a sign that the engine works without the request: a token of another one since the engine began.
While there is none, since all are suspects, another one is tried first. So an engine that can run nothing convicts
nobody, and uses its restarts up. A request that is the only one is convicted all the same.

What a convicted request did counts as one death against the limit of restarts: it is not the engine that is bad.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from raypp.errors import FatalRequestError

SUSPICIOUS_DEATHS = 2
"""One may be chance. Two in a row without a token in between mostly are not; a third one, in a trial, decides."""


class Verdict(NamedTuple):
    """What a death says of the requests."""

    convicted: int | None  # handle of the one that kills engines
    num_excused: int  # of the deaths so far, those that are some request's and no sign of a bad engine


class _Record(NamedTuple):
    num_deaths: int
    num_tokens: int  # that it had at the last of them
    num_excused: int = 0


class Trials:
    """Counts the deaths of engines by request, and says which requests wait for their trial.

    Requests are named by their handles. While no engine dies it is not asked and keeps nothing.
    """

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}
        self._waiting: deque[int] = deque()  # suspects, in the order of their trials
        self._on_trial: int | None = None
        self._awaited: set[int] = set()  # others that were in a step at the death and have yielded nothing since
        self._engine_works = False  # a request has had a token since the engine began; kept while trials go on

    @property
    def are_going_on(self) -> bool:
        """Whether `note_tokens` and `next` want to be called."""
        return bool(self._waiting) or self._on_trial is not None

    def note_death(
        self, in_flight: Collection[int] | None, num_tokens: Mapping[int, int], *, is_only_request: bool
    ) -> Verdict:
        """Take in that an engine died of something that may be a request's doing.

        Args:
            in_flight: The requests that were in a step; None: nobody knows, so all that the engine had are counted.
            num_tokens: Of each unfinished request, how many tokens it has.
            is_only_request: Whether they are all continuations of one.
        """
        on_trial, self._on_trial = self._on_trial, None
        self._records = {handle: record for handle, record in self._records.items() if handle in num_tokens}
        had = num_tokens.keys() - set(self._waiting)
        counted = had if in_flight is None else had & set(in_flight)
        if on_trial is not None and on_trial in counted:
            record = self._records.pop(on_trial)
            if self._engine_works or is_only_request:
                return Verdict(on_trial, record.num_deaths - record.num_excused)
            self._records[on_trial] = _counted_once_more(record, record.num_tokens)
            self._waiting.append(on_trial)  # nothing shows that the engine can run others
            return Verdict(None, 0)
        if on_trial is not None and on_trial in num_tokens:
            self._waiting.appendleft(on_trial)
        for handle in counted:
            self._records[handle] = _counted_once_more(self._records.get(handle), num_tokens[handle])
        suspects = sorted(handle for handle in counted if self._records[handle].num_deaths >= SUSPICIOUS_DEATHS)
        for handle in suspects:
            self._records[handle] = self._records[handle]._replace(num_excused=1)
        self._waiting.extend(suspects)
        self._awaited = counted.difference(suspects)
        return Verdict(None, 1 if suspects else 0)

    def begin(self, unfinished: Sequence[int]) -> list[int]:
        """Return those of the unfinished requests that a new engine gets at once, in order."""
        self._engine_works = False
        waiting = set(self._waiting)
        return [handle for handle in unfinished if handle not in waiting]

    def note_tokens(self, handles: Collection[int]) -> None:
        """Take in that these requests have had tokens."""
        self._engine_works = self._engine_works or bool(handles)
        self._awaited.difference_update(handles)
        if self._on_trial is not None and self._on_trial in handles:
            self._records.pop(self._on_trial, None)
            self._on_trial = None

    def next(self, unfinished: Collection[int]) -> int | None:
        """Return the request that goes on trial now; None: there is none, or it is not yet time.

        Args:
            unfinished: All requests that have not ended.
        """
        if self._on_trial is not None and self._on_trial in unfinished:
            return None
        self._on_trial = None
        self._waiting = deque(handle for handle in self._waiting if handle in unfinished)
        has_others = len(unfinished) > len(self._waiting)
        if not self._waiting or (has_others and not self._engine_works) or not self._awaited.isdisjoint(unfinished):
            return None
        self._on_trial = self._waiting.popleft()
        return self._on_trial


def _counted_once_more(record: _Record | None, num_tokens: int) -> _Record:
    if record is None or num_tokens > record.num_tokens:
        return _Record(1, num_tokens)
    return record._replace(num_deaths=record.num_deaths + 1)


def conviction(request_id: str) -> FatalRequestError:
    """Return the error that a convicted request ends with."""
    return FatalRequestError(
        "the engine died again and again while it ran this request, and not while it ran others",
        request_id=request_id,
        hint="do not send it again; the log names what died, and of what",
    )

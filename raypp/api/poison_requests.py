"""Poison-request detection: a request that kills engines must not take all others with it, again and again.

A death of the engine makes suspects of the requests that were in a step and have had no token since they were handed to
that engine. The continuations of one request are one suspect. The next engine gets all other requests first. Each
suspect then runs alone, that is without other suspects, until its first token clears it. A suspect is a poison request
when the engine has died in three of its runs alone, one after the other.

Deaths from outside must not look like that, also when they come in series:

- A death while no suspect ran alone has another cause: all counts begin anew. So does the count of a suspect if another
  part of the engine died than before: a request kills the same part each time.
- Something that kills soon after each start would meet the same run each time. So while there are suspects, a death
  soon after a start makes them wait until the next engine has lived three times as long.
- A run alone counts if the engine has run other requests before it, or if there are none. After one in which the engine
  died, the other suspects are next. So an engine that can run nothing finds no poison request, and uses its restarts
  up.

Deaths of which the cause is known (a lost node, a restart on purpose) count for nothing.

All deaths of a poison request count as one against the limit of restarts: it is not the engine that is bad.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from raypp.errors import FatalRequestError

_NUM_DEATHS = 3
_TIMES_AS_OLD = 3.0
_SOON_S = 15.0  # younger engines died soon after their start
_MAX_WAIT_S = 30.0


class Finding(NamedTuple):
    """What a death says of the requests."""

    poison_id: str | None  # the request that kills engines
    num_excused: int  # of the deaths so far, those that are some request's and no sign of a bad engine


@dataclass(slots=True)
class _Suspect:
    num_deaths: int = 0  # in its runs alone, one after the other
    part: Hashable = None  # what died in them
    num_counted: int = 0  # deaths that it may have caused and that count against the limit of restarts


class PoisonDetector:
    """Finds the request that engines die of, and says which requests wait until others have been handed over.

    Requests are named by their ids. While no engine dies it is not called and keeps nothing.

    Args:
        clock: Monotonic, seconds; for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s = clock()
        self._age_s = 0.0  # of the last engine, at its death
        self._part: Hashable = None  # what of it died
        self._wait_s = 0.0  # how old an engine has to be for a run alone
        self.suspects: dict[str, _Suspect] = {}
        """In the order of their runs. While there are none, `note_tokens` and `next` need not be called."""
        self._alone: str | None = None  # the suspect that was handed over and has had no token yet
        self._awaited: set[str] = set()  # others that were in a step at the death and have had no token since
        self._num_tokens_at_start: dict[str, int] = {}  # of requests that the present engine got with tokens
        self._works = False  # whether a request has had a token of the present engine

    @property
    def wait_s(self) -> float:
        """How long the engine is too young for a run alone, seconds; after that, `next` wants to be called."""
        return max(self._began_s + self._wait_s - self._clock(), 0.0) if self.suspects else 0.0

    def note_loss(self, part: Hashable) -> None:
        """Take in that the engine died just now; `note_death` follows when it is back.

        Args:
            part: What of it died.
        """
        self._age_s, self._part = self._clock() - self._began_s, part

    def note_death(
        self,
        in_flight: Collection[str] | None,
        num_tokens: Mapping[str, int],
        *,
        max_running: int,
        is_explained: bool = False,
    ) -> Finding:
        """Take in that an engine ended.

        Args:
            in_flight: The requests that were in a step; None: unknown, so those that can have been are meant.
            num_tokens: Of each unfinished request, how many tokens it has; in the order in which they came.
            max_running: The most requests that can have been in a step, where it is unknown which were.
            is_explained: Whether it is known that no request did it: a node was lost, or it was ended on purpose.
        """
        ran_alone, self._alone = self._alone, None
        self.suspects = {name: suspect for name, suspect in self.suspects.items() if name in num_tokens}
        had = [name for name in num_tokens if name == ran_alone or name not in self.suspects]
        silent = [name for name in had if num_tokens[name] == self._num_tokens_at_start.get(name, 0)]
        speaking = set(had).difference(silent)
        self._awaited = set() if is_explained else speaking if in_flight is None else speaking.intersection(in_flight)
        if is_explained:
            return Finding(None, 0)
        if in_flight is None:
            in_flight = silent[: max(max_running - len(speaking), 0)]
        accused = [name for name in silent if name in in_flight]
        is_only = len(num_tokens) == 1
        if is_only and accused:
            [ran_alone] = accused
        if not self.suspects:
            self._wait_s = 0.0
        elif self._age_s < _SOON_S:
            self._wait_s = max(self._wait_s, min(_TIMES_AS_OLD * self._age_s, _MAX_WAIT_S))
        if ran_alone not in accused:
            for suspect in self.suspects.values():
                suspect.num_deaths = 0
        for name in sorted(accused, key=lambda name: name == ran_alone):  # that one is the last of the next runs
            self.suspects[name] = suspect = self.suspects.pop(name, _Suspect())
            suspect.num_counted += 1
        if ran_alone in accused and (self._works or is_only):
            return self._note_run(ran_alone)
        return Finding(None, 0)

    def begin(self, num_tokens: Mapping[str, int]) -> list[str]:
        """Return those of the unfinished requests that a new engine gets at once, in order.

        Args:
            num_tokens: Of each, how many tokens it has.
        """
        self._works = False
        self._began_s = self._clock()
        self._num_tokens_at_start = {name: count for name, count in num_tokens.items() if count}
        return [name for name in num_tokens if name not in self.suspects]

    def note_tokens(self, names: Collection[str]) -> None:
        """Take in that these requests have had tokens."""
        self._works = self._works or bool(names)
        self._awaited.difference_update(names)
        for name in names:
            self.suspects.pop(name, None)

    def next(self, unfinished: Collection[str]) -> str | None:
        """Return the suspect that is handed over now, before all others that wait; None if it is not yet time.

        Args:
            unfinished: All requests that have not ended.
        """
        self.suspects = {name: suspect for name, suspect in self.suspects.items() if name in unfinished}
        if self._alone not in self.suspects:
            self._alone = None
        has_others = len(unfinished) > len(self.suspects)
        is_time = (self._works or not has_others) and self._awaited.isdisjoint(unfinished) and not self.wait_s
        if not self.suspects or self._alone is not None or not is_time:
            return None
        self._alone = next(iter(self.suspects))
        return self._alone

    def _note_run(self, name: str) -> Finding:
        suspect = self.suspects[name]
        suspect.num_deaths = suspect.num_deaths + 1 if suspect.part == self._part else 1
        suspect.part = self._part
        if suspect.num_deaths == _NUM_DEATHS:
            del self.suspects[name]
            self._wait_s = 0.0
            return Finding(name, suspect.num_counted - 1)
        num_excused = int(self._works)
        suspect.num_counted -= num_excused
        return Finding(None, num_excused)


def poison_error(request_id: str) -> FatalRequestError:
    """Return the error that a poison request ends with."""
    return FatalRequestError(
        "the engine died again and again while it ran this request, and not while it ran others",
        request_id=request_id,
        hint="do not send it again; the log names what died, and of what",
    )

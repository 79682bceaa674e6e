"""Cohorts: groups of decode rows that step together, one group after the other.

There are as many cohorts as stages. While one is in the first stage, the others are in later stages. So a row that has
every `num_stages`-th step finds its last token fed back already, and no stage waits.
"""

from __future__ import annotations

from collections.abc import Collection

from raypp.scheduler.request_state import RequestState


class Cohort:
    """Rows that decode together, longest member first."""

    __slots__ = ("index", "num_in_flight", "states")

    def __init__(self, index: int) -> None:
        self.index = index
        self.states: list[RequestState] = []
        self.num_in_flight = 0


class Cohorts:
    """All cohorts, taking turns."""

    def __init__(self, num_cohorts: int, max_rows: int, max_steps: int) -> None:
        self._cohorts = [Cohort(index) for index in range(num_cohorts)]
        self._max_rows = max_rows
        self._max_steps = max_steps
        self._next = 0
        self._cohort_of: dict[RequestState, Cohort] = {}

    def in_turn(self) -> list[Cohort]:
        """Return all cohorts, the one whose turn it is first."""
        return self._cohorts[self._next :] + self._cohorts[: self._next]

    def note_dispatched(self, cohort: Cohort) -> None:
        """Count a step of the cohort; it is the next one's turn."""
        cohort.num_in_flight += 1
        self._next = (cohort.index + 1) % len(self._cohorts)

    def join(self, state: RequestState, stepping: Cohort) -> None:
        """Let a row decode from now on. `stepping` is the cohort in whose step its prefill ends.

        That cohort has its next turn just when the row's first token has been fed back; any other one would come too
        soon. If the cohort becomes too large, `rebalance` moves rows out.
        """
        cohort = stepping if len(stepping.states) < self._max_rows else self._smallest()
        self._enter(state, cohort)

    def leave(self, state: RequestState) -> None:
        """Take out a row."""
        self._cohort_of.pop(state).states.remove(state)

    def rebalance(self) -> None:
        """Move rows from the largest cohort to the smallest until sizes differ by one at most.

        A moved row steps with its new cohort as soon as its last token has been fed back, so it loses less than one
        turn. The longest member is moved: else the same row might be moved again and again and never step.
        """
        sizes = [len(cohort.states) for cohort in self._cohorts]
        while max(sizes) - min(sizes) > 1:
            source, target = sizes.index(max(sizes)), sizes.index(min(sizes))
            self._enter(self._cohorts[source].states.pop(0), self._cohorts[target])
            sizes[source] -= 1
            sizes[target] += 1

    def _smallest(self) -> Cohort:
        return min(self._cohorts, key=lambda cohort: len(cohort.states))

    def _enter(self, state: RequestState, cohort: Cohort) -> None:
        cohort.states.append(state)
        self._cohort_of[state] = cohort

    def check_integrity(self, decoding: Collection[RequestState], steps_in_flight: Collection[Cohort]) -> None:
        """Assert that each decoding row is in one cohort, and the bounds on rows and on steps in flight."""
        members = [state for cohort in self._cohorts for state in cohort.states]
        assert len(members) == len(set(members))
        assert set(members) == set(decoding) == set(self._cohort_of), "a decoding row is in no cohort, or another is"
        steps = list(steps_in_flight)
        for cohort in self._cohorts:
            assert all(self._cohort_of[state] is cohort for state in cohort.states)
            assert len(cohort.states) <= self._max_rows
            assert cohort.num_in_flight == steps.count(cohort) <= self._max_steps

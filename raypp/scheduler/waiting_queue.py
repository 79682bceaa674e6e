"""The waiting requests in the order of their admission: by priority, then first come, first served.

Requests that may have killed an engine are handed over to go first: before all others, whatever their priority.

Of one priority, those that an engine before this one has begun are served before the others: somebody reads their
texts, and they may come later, from another client or when their grammars are compiled.

No other module knows this order; preemption asks here, too.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from raypp.scheduler.request_state import RequestState

Turn = tuple[bool, int, bool, int]
"""Whether it has no claim to go first, priority, whether it begins here, and arrival. The smallest is served first.

No two requests have the same.
"""

_FEW_STALE_TURNS = 64


class WaitingQueue:
    """Requests without a row, in the order in which they will get one."""

    def __init__(self) -> None:
        self.states: dict[Turn, RequestState] = {}
        """By their turns, in no order."""
        # A heap. Turns of requests that were removed from elsewhere than the front stay, until most turns are such.
        self._turns: list[Turn] = []
        self.num_tokens = 0  # that their prefills will have to compute, if nothing is cached

    def __len__(self) -> int:
        return len(self.states)

    def __contains__(self, state: RequestState) -> bool:
        return turn_of(state) in self.states

    def __iter__(self) -> Iterator[RequestState]:
        return iter([self.states[turn] for turn in sorted(self.states)])

    @property
    def head(self) -> RequestState:
        """The request that is next."""
        while self._turns[0] not in self.states:
            heapq.heappop(self._turns)
        return self.states[self._turns[0]]

    def push(self, state: RequestState) -> None:
        """Take in a request: a new one, or one that was preempted and is served before most others."""
        turn = turn_of(state)
        self.states[turn] = state
        heapq.heappush(self._turns, turn)
        self.num_tokens += state.num_tokens

    def note_growth(self, num_tokens: int) -> None:
        """Count tokens that a waiting request got from steps dispatched before it was preempted."""
        self.num_tokens += num_tokens

    def remove(self, state: RequestState) -> None:
        """Take a request out, wherever it stands."""
        del self.states[turn_of(state)]
        self.num_tokens -= state.num_tokens
        if len(self._turns) > 2 * len(self.states) + _FEW_STALE_TURNS:
            self.states = dict(self.states)  # a copy: a dict that shrinks keeps its memory
            self._turns = list(self.states)
            heapq.heapify(self._turns)

    @staticmethod
    def last_of(states: Iterable[RequestState]) -> RequestState:
        """Return the one that would be served last: whom to preempt."""
        return max(states, key=turn_of)

    def check_integrity(self, running: Iterable[RequestState]) -> None:
        """Assert that nobody overtook anybody of the same priority, and the count of tokens.

        Requests with images may be overtaken while they wait for these.
        """
        first_waiting: dict[tuple[bool, int, bool], int] = {}
        for state in self:
            if state.request.items is None:
                first_waiting.setdefault(turn_of(state)[:3], state.arrival)
        assert set(self.states) <= set(self._turns)
        assert len(self._turns) <= 2 * len(self.states) + _FEW_STALE_TURNS + 1
        for state in running:
            arrival = first_waiting.get(turn_of(state)[:3], state.arrival)
            assert state.arrival <= arrival, "a request was overtaken"
        assert self.num_tokens == sum(state.num_tokens for state in self)


def turn_of(state: RequestState) -> Turn:
    """Return the request's place in the order."""
    request = state.request
    return not request.goes_first, request.priority, not request.num_earlier_tokens, state.arrival

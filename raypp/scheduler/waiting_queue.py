"""Who is admitted next. The only place that knows the order of requests: first come, first served."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from raypp.scheduler.request_state import RequestState


class WaitingQueue:
    """Requests without a row, in the order in which they will get one."""

    def __init__(self) -> None:
        self._states: OrderedDict[str, RequestState] = OrderedDict()
        self.num_tokens = 0  # that their prefills will have to compute, if nothing is cached

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    @property
    def head(self) -> RequestState:
        """The request that is next."""
        return next(iter(self._states.values()))

    def push(self, state: RequestState) -> None:
        """Take in a new request."""
        self._states[state.request.request_id] = state
        self.num_tokens += state.num_tokens

    def push_back_in(self, state: RequestState) -> None:
        """Take in a preempted request: it has come before all that wait."""
        self.push(state)
        self._states.move_to_end(state.request.request_id, last=False)

    def note_growth(self, num_tokens: int) -> None:
        """Count tokens that a waiting request got from steps dispatched before it was preempted."""
        self.num_tokens += num_tokens

    def remove(self, state: RequestState) -> None:
        """Take a request out, wherever it stands."""
        del self._states[state.request.request_id]
        self.num_tokens -= state.num_tokens

    @staticmethod
    def last_of(states: Iterable[RequestState]) -> RequestState:
        """Return the one that would be served last: whom to preempt."""
        return max(states, key=lambda state: state.arrival)

    def check_integrity(self, running: Iterable[RequestState]) -> None:
        """Assert that nobody overtook anybody, and the count of tokens."""
        order = [state.arrival for state in self]
        assert order == sorted(order)
        assert not order or all(state.arrival < order[0] for state in running), "a request was overtaken"
        assert self.num_tokens == sum(state.num_tokens for state in self)

"""The steps in flight: dispatched, and their results not collected yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from raypp.messages import NO_STEP
from raypp.scheduler.cohorts import Cohort
from raypp.scheduler.request_state import ItemPin, RequestState


@dataclass(eq=False, slots=True)
class Chunk:
    """The part of a prefill that one step computes."""

    state: RequestState
    start: int  # position of its first token
    num_tokens: int
    is_last: bool  # the prefill ends with it, and it yields the first new token
    is_first: bool  # the request gets its row with it
    row_last_step: int = NO_STEP  # of a first chunk: the last step that contained the row's previous owner


@dataclass(eq=False, slots=True)
class InFlightStep:
    """What the scheduler keeps of a step until its result arrives."""

    step_id: int
    cohort: Cohort
    num_drafts: int
    decoding: list[RequestState]
    chunks: list[Chunk]
    freed_rows: list[int] = field(default_factory=list)  # no later step contains their last owner
    freed_pins: list[ItemPin] = field(default_factory=list)  # no later step reads their items

    @property
    def states(self) -> list[RequestState]:
        """The requests that it contains, in the order of its rows; some may have ended."""
        return [*self.decoding, *(chunk.state for chunk in self.chunks)]


class InFlightSteps:
    """A queue of steps with consecutive ids."""

    def __init__(self) -> None:
        self._steps: deque[InFlightStep] = deque()
        self.next_step_id = 0

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[InFlightStep]:
        return iter(self._steps)

    @property
    def last_collected(self) -> int:
        """The newest step whose result was collected; NO_STEP before the first."""
        return self.next_step_id - len(self._steps) - 1

    def append(self, step: InFlightStep) -> None:
        """Take in a step that is being dispatched."""
        assert step.step_id == self.next_step_id
        self._steps.append(step)
        self.next_step_id += 1

    def collect(self, step_id: int) -> InFlightStep:
        """Return the oldest step, whose result has arrived."""
        step = self._steps.popleft()
        assert step.step_id == step_id, f"results come in step order: got {step_id}, expected {step.step_id}"
        return step

    def __getitem__(self, step_id: int) -> InFlightStep:
        return self._steps[step_id - self.last_collected - 1]

    def check_integrity(self, states: Collection[RequestState], max_steps: int) -> None:
        """Assert that what these requests have in flight is counted right, and is in at most `max_steps` steps."""
        yields = dict.fromkeys(states, 0)
        tokens = dict.fromkeys(states, 0)
        for step in self._steps:
            bounds = [(state, 1 + step.num_drafts) for state in step.decoding]
            bounds += [(chunk.state, 1) for chunk in step.chunks if chunk.is_last]
            for state, bound in bounds:
                if state in yields:
                    yields[state] += 1
                    tokens[state] += bound
        for state in states:
            assert state.num_in_flight_yields == yields[state] <= max_steps
            assert state.max_in_flight_tokens == tokens[state]

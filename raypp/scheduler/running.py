"""The running requests: they get rows here, go from prefill to decode, and give rows, blocks and images back."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from raypp.messages import NO_STEP
from raypp.scheduler.item_admission import ItemAdmission
from raypp.scheduler.kv_blocks import KvBlocks
from raypp.scheduler.limits import SchedulerLimits
from raypp.scheduler.request_state import NO_ROW, ItemPin, RequestState


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


class RowPool:
    """The rows of the stages' tables. Hands out the one that has been free for longest first."""

    def __init__(self, num_rows: int) -> None:
        self._free = deque(range(num_rows))
        self._last_steps = [NO_STEP] * num_rows

    @property
    def num_free(self) -> int:
        """Rows that `take` can hand out."""
        return len(self._free)

    def take(self) -> tuple[int, int]:
        """Return a free row, and the last step that contained its previous owner.

        The first stage must apply that step's feedback before the new owner starts: else tokens of the old owner would
        go to the new one.
        """
        row = self._free.popleft()
        return row, self._last_steps[row]

    def give_back(self, row: int, last_step: int) -> None:
        """Free a row. `last_step` was the last that contained its owner, and its result has been collected."""
        self._last_steps[row] = last_step
        self._free.append(row)

    def check_integrity(self, owned: Collection[int], uncollected: Collection[int]) -> None:
        """Assert that each row is free, owned, or waits for its owner's last step to be collected."""
        assert sorted([*self._free, *owned, *uncollected]) == list(range(len(self._last_steps))), "a row leaked"


class RunningRequests:
    """Prefilling rows, in the order of their admission, and decoding rows, in cohorts."""

    def __init__(
        self, limits: SchedulerLimits, kv: KvBlocks, in_flight: InFlightSteps, admission: ItemAdmission
    ) -> None:
        self.cohorts = Cohorts(limits.num_stages, limits.max_step_rows, limits.max_steps_per_cohort)
        self._kv = kv
        self._in_flight = in_flight
        self._admission = admission
        self._rows = RowPool(limits.max_num_seqs)
        self._states: dict[RequestState, None] = {}  # a set that keeps its order
        self.prefilling: list[RequestState] = []
        """Those with prompt chunks to be dispatched."""
        self.num_without_grammar = 0
        """Running requests without a grammar: their steps must not wait for masks."""

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states)

    @property
    def num_free_rows(self) -> int:
        """Requests that may start now."""
        return self._rows.num_free

    def start(self, state: RequestState, num_cached_tokens: int) -> int:
        """Give a request that has its blocks a row; return the last step that contained the row's previous owner."""
        state.row, row_last_step = self._rows.take()
        state.num_prefill_tokens, state.num_prefilled_tokens = state.num_tokens, num_cached_tokens
        self._states[state] = None
        self.num_without_grammar += not state.has_grammar
        self.prefilling.append(state)
        return row_last_step

    def note_prefilled(self, chunk: Chunk, step: InFlightStep) -> None:
        """Count a chunk that is being dispatched; after its last one the row decodes."""
        state = chunk.state
        state.last_step = step.step_id
        state.num_prefilled_tokens += chunk.num_tokens
        self._kv.offer(state, state.num_prefilled_tokens)
        if chunk.is_last or self._kv.ends_shared(state):
            self._kv.save_state(state, state.num_prefilled_tokens)
        if state.item_pin is not None and state.num_prefilled_tokens >= state.item_pin.end:
            step.freed_pins.append(state.item_pin)
            state.item_pin = None
        if chunk.is_last:
            state.last_yield_step = step.step_id
            state.num_in_flight_yields += 1
            state.max_in_flight_tokens += 1
            self.prefilling.remove(state)
            self.cohorts.join(state, step.cohort)

    def stop(self, state: RequestState) -> None:
        """Take a request's blocks away, and its row as soon as no step in flight contains it."""
        del self._states[state]
        self.num_without_grammar -= not state.has_grammar
        if state.is_prefilling:
            self.prefilling.remove(state)
        else:
            self.cohorts.leave(state)
        self._kv.release(state)
        if state.last_step > self._in_flight.last_collected:
            # Its feedback is still to come, and must not go to the row's next owner.
            self._in_flight[state.last_step].freed_rows.append(state.row)
        else:
            self._rows.give_back(state.row, state.last_step)
        if state.item_pin is not None:
            self._let_go(state.item_pin, state.last_step)
            state.item_pin = None
        state.row = NO_ROW

    def collect(self, step_id: int) -> InFlightStep:
        """Return the oldest step in flight, whose result has arrived; what waited for that is free."""
        step = self._in_flight.collect(step_id)
        step.cohort.num_in_flight -= 1
        for row in step.freed_rows:
            self._rows.give_back(row, step.step_id)
        for pin in step.freed_pins:
            self._admission.unpin(pin)
        return step

    def check_integrity(self) -> None:
        """Assert that rows, blocks and cohorts are those of the running requests."""
        self._kv.check_integrity(self._states)
        assert self.num_without_grammar == sum(not state.has_grammar for state in self._states)
        uncollected = [row for step in self._in_flight for row in step.freed_rows]
        self._rows.check_integrity([state.row for state in self._states], uncollected)
        pins = [state.item_pin for state in self._states if state.item_pin is not None]
        self._admission.check_integrity([*pins, *(pin for step in self._in_flight for pin in step.freed_pins)])
        assert self.prefilling == [state for state in self._states if state.is_prefilling]
        decoding = [state for state in self._states if not state.is_prefilling]
        self.cohorts.check_integrity(decoding, [step.cohort for step in self._in_flight])

    def _let_go(self, pin: ItemPin, last_step: int) -> None:
        """Unpin what no step after `last_step` reads, as soon as that is collected."""
        if last_step > self._in_flight.last_collected:
            self._in_flight[last_step].freed_pins.append(pin)
        else:
            self._admission.unpin(pin)

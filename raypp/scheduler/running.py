"""The running requests: they get rows here, go from prefill to decode, and give rows, blocks and images back."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence

from raypp.messages import NO_STEP
from raypp.scheduler.cohorts import Cohorts
from raypp.scheduler.in_flight import Chunk, InFlightStep, InFlightSteps
from raypp.scheduler.item_admission import ItemAdmission
from raypp.scheduler.kv_blocks import KvBlocks
from raypp.scheduler.limits import SchedulerLimits
from raypp.scheduler.request_state import NO_ROW, ItemPin, RequestState


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
        self._prefilling: list[RequestState] = []
        self.num_without_grammar = 0
        """Running requests without a grammar: their steps must not wait for masks."""

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states)

    @property
    def prefilling(self) -> Sequence[RequestState]:
        """Those with prompt chunks to be dispatched."""
        return self._prefilling

    @property
    def num_free_rows(self) -> int:
        """Requests that may start now."""
        return self._rows.num_free

    def start(self, state: RequestState, num_cached_tokens: int) -> int:
        """Give a request that has its blocks a row; return the last step that contained the row's previous owner."""
        state.row, row_last_step = self._rows.take()
        state.num_prefill_tokens, state.num_prefilled_tokens = state.num_tokens, num_cached_tokens
        self._states[state] = None
        self.num_without_grammar += not state.request.has_grammar
        self._prefilling.append(state)
        return row_last_step

    def note_prefilled(self, chunk: Chunk, step: InFlightStep) -> None:
        """Count a chunk that is being dispatched; after its last one the row decodes."""
        state = chunk.state
        state.last_step = step.step_id
        state.num_prefilled_tokens += chunk.num_tokens
        self._kv.offer(state, state.num_prefilled_tokens)
        if state.item_pin is not None and state.num_prefilled_tokens >= state.item_pin.end:
            step.freed_pins.append(state.item_pin)
            state.item_pin = None
        if chunk.is_last:
            state.last_yield_step = step.step_id
            state.num_in_flight_yields += 1
            state.max_in_flight_tokens += 1
            self._prefilling.remove(state)
            self.cohorts.join(state, step.cohort)

    def stop(self, state: RequestState) -> None:
        """Take a request's blocks away, and its row as soon as no step in flight contains it."""
        del self._states[state]
        self.num_without_grammar -= not state.request.has_grammar
        if state.is_prefilling:
            self._prefilling.remove(state)
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

    def note_collected(self, step: InFlightStep) -> None:
        """Free what waited for the step's result."""
        step.cohort.num_in_flight -= 1
        for row in step.freed_rows:
            self._rows.give_back(row, step.step_id)
        for pin in step.freed_pins:
            self._admission.unpin(pin)

    def check_integrity(self) -> None:
        """Assert that rows, blocks and cohorts are those of the running requests."""
        self._kv.check_integrity(self._states)
        assert self.num_without_grammar == sum(not state.request.has_grammar for state in self._states)
        uncollected = [row for step in self._in_flight for row in step.freed_rows]
        self._rows.check_integrity([state.row for state in self._states], uncollected)
        pins = [state.item_pin for state in self._states if state.item_pin is not None]
        self._admission.check_integrity([*pins, *(pin for step in self._in_flight for pin in step.freed_pins)])
        assert self._prefilling == [state for state in self._states if state.is_prefilling]
        decoding = [state for state in self._states if not state.is_prefilling]
        self.cohorts.check_integrity(decoding, [step.cohort for step in self._in_flight])

    def _let_go(self, pin: ItemPin, last_step: int) -> None:
        """Unpin what no step after `last_step` reads, as soon as that is collected."""
        if last_step > self._in_flight.last_collected:
            self._in_flight[last_step].freed_pins.append(pin)
        else:
            self._admission.unpin(pin)

"""On a simulated clock: the plans' order and their feedback requirements keep all stages busy."""

from __future__ import annotations

import random
from collections import deque

import pytest
from drive import make_limits, make_request, make_result

from raypp.scheduler.limits import SchedulerLimits
from raypp.scheduler.scheduler import Scheduler

STEP_S = 1.0  # of one stage
DRIVER_S = 0.05  # from the last stage to the driver, and from there to the first stage


class Clock:
    """Stages that take `STEP_S` for a step, and wait for the feedback that a plan requires."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.scheduler = Scheduler(limits)
        self._free_at = [0.0] * limits.num_stages
        self._fed_back_at: list[float] = []  # of each step
        self._in_flight: deque = deque()
        self.now = 0.0

    def run_until(self, end: float) -> None:
        """Dispatch and collect until the simulated time."""
        while True:
            while (plan := self.scheduler.schedule()) is not None:
                self._execute(plan)
            if not self._in_flight or self._fed_back_at[self._in_flight[0].step_id] + DRIVER_S > end:
                self.now = end
                self.scheduler.check_integrity()
                return
            plan = self._in_flight.popleft()
            self.now = max(self.now, self._fed_back_at[plan.step_id] + DRIVER_S)
            self.scheduler.update(make_result(plan))

    def _execute(self, plan) -> None:
        required = plan.requires_feedback_of
        time = max(self.now + DRIVER_S, self._fed_back_at[required] if required >= 0 else 0.0)
        for index, free_at in enumerate(self._free_at):
            time = max(time, free_at) + STEP_S
            self._free_at[index] = time
        self._fed_back_at.append(time)
        self._in_flight.append(plan)

    def busy_fraction(self, start: float, end: float) -> float:
        """Return the share of that time in which the last stage computed."""
        return sum(start < time <= end for time in self._fed_back_at) * STEP_S / (end - start)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("num_requests", [1, 2, 3, 4, 5, 12])
def test_as_many_stages_are_busy_as_there_are_requests(num_stages, num_requests):
    clock = Clock(make_limits(num_stages=num_stages, max_num_seqs=12, num_blocks=10_000, max_model_len=1000))
    for i in range(num_requests):
        clock.scheduler.add(make_request(str(i), 4, max_tokens=900))
        clock.run_until(clock.now + 5 * (i % 2))  # some come together, some while the others are under way
    clock.run_until(300.0)
    expected = min(num_requests / num_stages, 1.0)
    assert clock.busy_fraction(100.0, 300.0) >= 0.98 * expected - (DRIVER_S if num_requests == 1 else 0)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("num_blocks", [10_000, 64])
def test_arrivals_ends_and_preemptions_leave_no_lasting_bubbles(num_stages, num_blocks):
    """Could cohorts overtake each other, a disturbed order would repeat for ever, with half the stages idle."""
    rng = random.Random(num_stages)
    clock = Clock(
        make_limits(num_stages=num_stages, max_num_seqs=16, num_blocks=num_blocks, enable_prefix_caching=True)
    )
    for i in range(150):
        prompt = [rng.randrange(100) for _ in range(rng.randint(1, 12))]
        clock.scheduler.add(make_request(str(i), prompt, max_tokens=rng.randint(4, 60)))
        clock.run_until(clock.now + rng.expovariate(0.5 if num_blocks > 1000 else 2))
    end = clock.now
    busy = clock.busy_fraction(20.0, end)
    stats = clock.scheduler.stats()
    assert clock.scheduler.has_unfinished
    assert (stats.num_preemptions > 0) == (num_blocks == 64)
    assert busy >= 0.9


def test_a_long_prompt_fills_the_pipeline():
    clock = Clock(
        make_limits(num_stages=4, max_num_batched_tokens=512, max_model_len=4096, num_blocks=2000, max_num_seqs=8)
    )
    clock.scheduler.add(make_request("a", 4000, max_tokens=1))
    clock.run_until(8.0 + 4)
    assert clock.busy_fraction(4.5, 12.0) >= 0.9


def test_decoding_goes_on_beside_a_long_prompt():
    clock = Clock(
        make_limits(num_stages=4, max_num_batched_tokens=64, max_model_len=4096, num_blocks=4000, max_num_seqs=8)
    )
    decoding = make_request("a", 4, max_tokens=1000)
    clock.scheduler.add(decoding)
    clock.run_until(20.0)
    clock.scheduler.add(make_request("b", 4000, max_tokens=1))
    before = len(decoding.output_token_ids)
    clock.run_until(60.0)
    assert len(decoding.output_token_ids) - before >= 9  # a token in four steps, as if it were alone
    assert clock.busy_fraction(26.0, 60.0) >= 0.95

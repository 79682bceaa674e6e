"""Which stage is said to stand still, by a clock that the test turns."""

from __future__ import annotations

import pytest

from raypp.driver.stage_health import AwakeClock, StageHealth


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def _health(clock: Clock, num_stages: int = 3) -> StageHealth:
    return StageHealth(num_stages, step_timeout_s=10.0, silence_timeout_s=20.0, clock=clock)


def _let_pass(clock: Clock, health: StageHealth, seconds: float, step_ids: list[int | None], *, is_busy: bool = True):
    """Let time pass while the stages send heartbeats (None: a stage does not); return the first error."""
    for _ in range(round(seconds * 2)):
        clock.now_s += 0.5
        for stage_index, step_id in enumerate(step_ids):
            if step_id is not None:
                health.heard(stage_index, step_id)
        if (error := health.check(is_busy=is_busy)) is not None:
            return error
    return None


def test_progress_on_any_stage_is_progress():
    clock = Clock()
    health = _health(clock)
    for step_id in range(5):
        assert _let_pass(clock, health, 9.0, [step_id, -1, -1]) is None
    assert _let_pass(clock, health, 9.0, [4, 0, -1]) is None


def test_a_stage_that_hangs_is_named_though_it_sends_heartbeats():
    clock = Clock()
    health = _health(clock)
    error = _let_pass(clock, health, 30.0, [7, 3, 3])
    assert error is not None
    assert error.stage_index == 1, "the stage behind it has finished as few steps: it waits"
    assert 110.0 <= clock.now_s <= 111.0
    assert "step_timeout_s=10" in str(error)


@pytest.mark.parametrize("stopped", [0, 1, 2])
def test_a_stopped_stage_is_named_whatever_it_had_finished(stopped):
    clock = Clock()
    health = _health(clock)
    assert _let_pass(clock, health, 2.0, [5, 5, 5]) is None
    error = _let_pass(clock, health, 30.0, [None if i == stopped else 5 for i in range(3)])
    assert error is not None
    assert error.stage_index == stopped
    assert clock.now_s <= 113.0


@pytest.mark.parametrize(
    ("step_ids", "name"),
    [
        ([7, 7, 3, 3], "a member of stage 1 is frozen"),  # they wait for each other within a step
        ([7, 7, 4, 3], "member 1 of stage 1 is frozen"),
        ([7, None, 7, 7], "member 1 of stage 0 is frozen"),
    ],
)
def test_members_are_named_as_far_as_they_are_known(step_ids, name):
    clock = Clock()
    health = StageHealth(2, 2, step_timeout_s=10.0, silence_timeout_s=20.0, clock=clock)
    assert _let_pass(clock, health, 2.0, [0 if step_id is None else step_id for step_id in step_ids]) is None
    error = _let_pass(clock, health, 30.0, step_ids)
    assert error is not None
    assert name in str(error)


def test_an_idle_pipeline_may_stand_still():
    clock = Clock()
    health = _health(clock)
    assert _let_pass(clock, health, 100.0, [2, 2, 2], is_busy=False) is None
    assert _let_pass(clock, health, 9.0, [2, 2, 2]) is None, "the time counts from when there is something to do"
    assert _let_pass(clock, health, 2.0, [2, 2, 2]) is not None


def test_a_silent_stage_is_noticed_while_the_pipeline_is_idle():
    clock = Clock()
    health = _health(clock)
    error = _let_pass(clock, health, 30.0, [2, None, 2], is_busy=False)
    assert error is not None
    assert error.stage_index == 1
    assert 120.0 <= clock.now_s <= 121.0
    assert 20.0 <= error.silent_s <= 21.0


def test_time_in_which_nobody_looked_does_not_count():
    real = Clock()
    clock = AwakeClock(real, max_gap_s=5.0)
    health = StageHealth(2, step_timeout_s=10.0, silence_timeout_s=20.0, clock=clock)
    assert health.check(is_busy=True) is None
    real.now_s += 3600.0  # Ctrl-Z, and back an hour later
    assert health.check(is_busy=True) is None
    for _ in range(6):
        real.now_s += 2.0
        error = health.check(is_busy=True)
    assert error is not None

"""A stage's loop against a real step channel: order, stop, silence, and what is said when a step fails."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

from raypp.errors import DeadlineError, EngineDeadError, StageDiedError
from raypp.messages import Bools, Bytes, Float32s, Int32s, Int64s, StageReport, StepPlan, StepResult, pack, unpack
from raypp.row_params import DTYPE, RowParams
from raypp.stage.failure import read_failure
from raypp.stage.loop import run_stage_loop
from raypp.stage.step_result import PendingResult
from raypp.step_channel import DriverChannel, Heartbeat, StageChannel, StageError, StageResult
from raypp.tracing import ForwardCounter

DEADLINE_S = 20.0
HEARTBEAT_S = 0.05


def _plan(step_id: int) -> StepPlan:
    """Return a plan without rows."""
    hints = get_type_hints(StepPlan)
    values: dict[str, Any] = {f.name: 0 for f in fields(StepPlan) if hints[f.name] is int}
    dtypes: dict[Any, Any] = {
        Int32s: np.int32,
        Int64s: np.int64,
        Float32s: np.float32,
        Bools: np.bool_,
        Bytes: np.uint8,
    }
    dtypes |= {Bytes: np.uint8, RowParams: DTYPE}
    arrays = {f.name: np.empty(0, dtypes[hints[f.name]]) for f in fields(StepPlan) if f.name not in values}
    return StepPlan(**{**values, "step_id": step_id}, **arrays)


class ToyStage:
    """Answers each step with its number."""

    def __init__(self) -> None:
        self.announced: list[int] = []
        self.stepped: list[int] = []
        self.fails_at = -1
        self.error: Exception = ValueError("no such luck")
        self.make_result = lambda step_id: StepResult(step_id, np.full((1, 1), step_id, np.int32), np.ones(1, np.int32))
        self.may_step = threading.Event()
        self.may_step.set()
        self.num_looks_back = 0
        self.num_behind = 0  # looks back before the device has done everything
        self.caught_up = threading.Event()

    def bind_thread(self) -> None:
        pass

    def catch_up(self) -> bool:
        self.num_looks_back += 1
        if self.num_looks_back > self.num_behind:
            self.caught_up.set()
        return self.caught_up.is_set()

    def announce(self, plan: StepPlan) -> None:
        self.announced.append(plan.step_id)

    def step(self, plan: StepPlan) -> PendingResult:
        assert self.may_step.wait(DEADLINE_S)
        if plan.step_id == self.fails_at:
            raise self.error
        self.stepped.append(plan.step_id)
        return PendingResult(lambda: self.make_result(plan.step_id))


class Rig:
    def __init__(self, folder: Path, silence_timeout_s: float) -> None:
        self.driver = DriverChannel([f"ipc://{folder}/plans"], f"ipc://{folder}/results")
        self._channel = StageChannel(0, self.driver.stage_addresses[0], self.driver.result_address, num_stages=1)
        self.stage = ToyStage()
        self.forwards = ForwardCounter()
        self._pool = ThreadPoolExecutor(1)
        self.loop: Future[None] = self._pool.submit(
            run_stage_loop,
            self.stage,
            self._channel,
            process_index=0,
            heartbeat_s=HEARTBEAT_S,
            silence_timeout_s=silence_timeout_s,
            forwards=self.forwards,
        )

    def drop_reports(self, count: int) -> list[StageReport]:
        """Have the queue full when the next so many reports are sent; return the list that they go to."""
        send, dropped = self._channel.send_heartbeat, list[StageReport]()

        def send_or_drop(step_id: int, report: StageReport | None = None) -> bool:
            if report is None or len(dropped) == count:
                return send(step_id, report)
            dropped.append(report)
            return False

        self._channel.send_heartbeat = send_or_drop  # type: ignore[method-assign]
        return dropped

    def messages(self, kind: type, count: int) -> list:
        found: list = []
        ends = time.monotonic() + DEADLINE_S
        while len(found) < count:
            assert time.monotonic() < ends, f"only {len(found)} of {count} came"
            self.driver.send_heartbeat()
            found += [message for message in self.driver.receive(0.05) if isinstance(message, kind)]
        return found

    def close(self) -> None:
        self.stage.may_step.set()
        self.driver.send_stop()
        self._pool.shutdown()
        self._channel.close()
        self.driver.close()


@pytest.fixture
def make_rig() -> Iterator:
    rigs = []
    with tempfile.TemporaryDirectory(prefix="raypp") as folder:

        def make(silence_timeout_s: float = DEADLINE_S) -> Rig:
            rigs.append(Rig(Path(folder), silence_timeout_s))
            return rigs[-1]

        yield make
        for rig in rigs:
            rig.close()


def test_plans_are_run_in_order_until_stop(make_rig):
    rig = make_rig()
    for step_id in range(20):
        rig.driver.send_plan(pack(_plan(step_id)))
    results = [unpack(StepResult, message.payload).step_id for message in rig.messages(StageResult, 20)]
    assert results == rig.stage.stepped == rig.stage.announced == list(range(20))
    rig.driver.send_stop()
    rig.loop.result(DEADLINE_S)


def test_what_the_device_does_after_the_last_plan_is_noted_and_then_it_is_left_alone(make_rig):
    rig = make_rig()
    rig.stage.num_behind = 2
    rig.driver.send_plan(pack(_plan(0)))
    assert rig.stage.caught_up.wait(DEADLINE_S)
    rig.messages(Heartbeat, 4)
    assert rig.stage.num_looks_back == 3


def test_plans_are_announced_while_a_step_runs_and_heartbeats_tell_the_last_finished_one(make_rig):
    rig = make_rig()
    rig.driver.send_plan(pack(_plan(0)))
    rig.messages(StageResult, 1)
    rig.stage.may_step.clear()
    for step_id in (1, 2):
        rig.driver.send_plan(pack(_plan(step_id)))
    assert [beat.step_id for beat in rig.messages(Heartbeat, 3)] == [0, 0, 0]
    ends = time.monotonic() + DEADLINE_S
    while len(rig.stage.announced) < 3 and time.monotonic() < ends:
        time.sleep(0.01)
    assert rig.stage.announced == [0, 1, 2]
    assert rig.stage.stepped == [0]


def test_a_step_that_fails_ends_the_loop_and_the_driver_is_told_why(make_rig):
    rig = make_rig()
    rig.stage.fails_at = 2
    for step_id in range(4):
        rig.driver.send_plan(pack(_plan(step_id)))
    [message] = rig.messages(StageError, 1)
    error, is_cause = read_failure(message.description)
    assert is_cause
    assert isinstance(error, StageDiedError)
    assert error.stage_index == 0
    assert "ValueError: no such luck" in str(error)
    with pytest.raises(ValueError, match="no such luck"):
        rig.loop.result(DEADLINE_S)


@pytest.mark.parametrize(
    "error",
    [StageDiedError("stage 1 is gone", stage_index=1), DeadlineError("receiving from stage 1 took too long")],
)
def test_a_neighbours_end_is_reported_as_that(make_rig, error):
    rig = make_rig()
    rig.stage.fails_at, rig.stage.error = 0, error
    rig.driver.send_plan(pack(_plan(0)))
    [message] = rig.messages(StageError, 1)
    reported, is_cause = read_failure(message.description)
    assert not is_cause
    assert "stage 1" in str(reported)
    with pytest.raises(type(error)):
        rig.loop.result(DEADLINE_S)


def test_a_silent_driver_is_given_up(make_rig):
    rig = make_rig(silence_timeout_s=0.3)
    started = time.monotonic()
    with pytest.raises(EngineDeadError, match="has not been heard of"):
        rig.loop.result(DEADLINE_S)
    assert time.monotonic() - started > 0.3


def test_a_result_that_cannot_be_sent_ends_the_loop_though_no_step_follows(make_rig):
    rig = make_rig()

    def broken(step_id: int) -> StepResult:
        raise ValueError("the device failed")

    rig.stage.make_result = broken
    rig.driver.send_plan(pack(_plan(0)))
    [message] = rig.messages(StageError, 1)
    error, is_cause = read_failure(message.description)
    assert is_cause
    assert "the device failed" in str(error)
    with pytest.raises(ValueError, match="the device failed"):
        rig.loop.result(DEADLINE_S)


def test_sums_that_found_a_full_queue_are_told_again(make_rig):
    rig = make_rig()
    dropped = rig.drop_reports(2)
    rig.forwards.add(0, 0, 1000)
    ends = time.monotonic() + DEADLINE_S
    told = None
    while told is None:
        assert time.monotonic() < ends
        [heartbeat] = rig.messages(Heartbeat, 1)
        told = heartbeat.report
    assert len(dropped) == 2
    assert (told.num_steps, told.busy_ns) == (1, 1000)

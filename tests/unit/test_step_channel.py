"""The step channel: plans out; results, heartbeats and errors back; and what happens when an end is not there."""

from __future__ import annotations

import gc
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import numpy as np
import pytest

from raypp.errors import DeadlineError, ResourceError
from raypp.messages import StepResult, pack, unpack
from raypp.step_channel import DriverChannel, Heartbeat, StageChannel, StageError, StageResult, Stop

DEADLINE_S = 20.0


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="raypp") as folder:  # pytest's own are too long for a socket's path
        yield Path(folder)


@pytest.fixture
def driver(request: pytest.FixtureRequest, folder: Path) -> Iterator[DriverChannel]:
    names = ["stage0", "stage1", "results"]
    *plans, results = (
        f"ipc://{folder}/{name}" if getattr(request, "param", "ipc") == "ipc" else "tcp://127.0.0.1:*" for name in names
    )
    driver = DriverChannel(plans, results, send_timeout_s=0.2)
    yield driver
    driver.close()


@pytest.fixture
def stages(driver: DriverChannel) -> Iterator[list[StageChannel]]:
    stages = [
        StageChannel(index, address, driver.result_address, num_stages=2, send_timeout_s=0.2)
        for index, address in enumerate(driver.stage_addresses)
    ]
    yield stages
    for stage in stages:
        stage.close()


def take(driver: DriverChannel, count: int) -> list[StageResult | Heartbeat | StageError]:
    """Receive until `count` messages have come."""
    messages = []
    ends = time.monotonic() + DEADLINE_S
    while len(messages) < count:
        assert time.monotonic() < ends, f"only {len(messages)} messages came"
        messages += driver.receive(0.2)
    return messages


@pytest.mark.parametrize("driver", ["ipc", "tcp"], indirect=True)
def test_every_stage_gets_the_same_plans_in_order(driver: DriverChannel, stages: list[StageChannel]) -> None:
    plans = [bytes([step_id]) * (1 + step_id * 1000) for step_id in range(10)]
    for plan in plans:
        driver.send_plan(plan)
    driver.send_stop()
    for stage in stages:
        received = [stage.receive(DEADLINE_S) for _ in range(10)]
        assert [bytes(plan) for plan in received if isinstance(plan, memoryview)] == plans
        assert stage.receive(DEADLINE_S) == Stop()
        assert stage.receive(0.0) is None


@pytest.mark.parametrize("driver", ["ipc", "tcp"], indirect=True)
def test_results_heartbeats_and_errors_come_back(driver: DriverChannel, stages: list[StageChannel]) -> None:
    result = StepResult(7, np.array([[5], [6]], np.int32), np.array([1, 1], np.int32))
    stages[1].send_result(pack(result))
    stages[1].send_heartbeat(7)
    stages[1].send_error({"error": "it broke", "type": "ValueError"})
    first, heartbeat, error = take(driver, 3)
    assert isinstance(first, StageResult)
    assert first.stage_index == 1
    received = unpack(StepResult, first.payload)
    assert received.step_id == 7
    assert received.token_ids.tolist() == [[5], [6]]
    assert received.token_ids.flags.aligned
    assert isinstance(heartbeat, Heartbeat)
    assert (heartbeat.stage_index, heartbeat.step_id) == (1, 7)
    assert error == StageError(1, {"error": "it broke", "type": "ValueError"})


def test_receive_drains_what_is_there_and_does_not_wait_for_more(
    driver: DriverChannel, stages: list[StageChannel]
) -> None:
    for stage in stages:
        for step_id in range(5):
            stage.send_heartbeat(step_id)
    steps: dict[int, list[int]] = {0: [], 1: []}
    for message in take(driver, 10):
        assert isinstance(message, Heartbeat)
        steps[message.stage_index].append(message.step_id)
    assert steps == {0: [0, 1, 2, 3, 4], 1: [0, 1, 2, 3, 4]}
    assert driver.receive(0.0) == []


def test_the_results_socket_wakes_a_poller(driver: DriverChannel, stages: list[StageChannel]) -> None:
    assert not driver.socket.poll(0)
    stages[0].send_heartbeat(1)
    assert driver.socket.poll(int(DEADLINE_S * 1000))


@pytest.mark.parametrize("driver", ["ipc", "tcp"], indirect=True)
def test_a_stage_that_takes_nothing_is_named_and_the_others_get_their_plan(
    driver: DriverChannel, stages: list[StageChannel]
) -> None:
    plan = bytes(1 << 20)  # large, so that few of them fill the socket's own buffers
    sent = 0
    with pytest.raises(DeadlineError, match="stage 1"):  # noqa: PT012 - how many it takes is zmq's affair
        while sent < 1000:
            driver.send_plan(plan)
            sent += 1
            assert isinstance(stages[0].receive(DEADLINE_S), memoryview)
    assert isinstance(stages[0].receive(DEADLINE_S), memoryview)

    def tell() -> float:
        started = time.monotonic()
        driver.send_heartbeat()
        driver.send_stop()
        return time.monotonic() - started

    assert min(tell() for _ in range(5)) < 0.1, "a full queue held up a message that does not wait"


def test_a_stage_that_never_connected_is_named(driver: DriverChannel) -> None:
    started = time.monotonic()
    with pytest.raises(DeadlineError, match="stage 0"):
        driver.send_plan(b"plan")
    assert 0.19 < time.monotonic() - started < DEADLINE_S / 2


def test_a_stage_that_has_reached_its_driver_needs_no_socket_files_any_more(folder: Path) -> None:
    plans, results = f"ipc://{folder}/plans", f"ipc://{folder}/results"
    with closing(StageChannel(0, plans, results, num_stages=1)) as stage:
        with pytest.raises(DeadlineError, match="stage 0 cannot connect to the driver"):
            stage.await_driver(0.05)
        with closing(DriverChannel([plans], results)) as driver:
            stage.await_driver(DEADLINE_S)
            for name in ("plans", "results"):
                (folder / name).unlink()
            driver.send_plan(b"plan")
            assert stage.receive(DEADLINE_S) == b"plan"
            stage.send_heartbeat(1)
            assert take(driver, 1) == [Heartbeat(0, 1)]


def test_a_driver_that_takes_nothing_is_named_and_heartbeats_are_dropped(
    driver: DriverChannel, stages: list[StageChannel]
) -> None:
    result = bytes(1 << 20)
    with pytest.raises(DeadlineError, match="driver"):  # noqa: PT012
        for _ in range(1000):
            stages[1].send_result(result)
    started = time.monotonic()
    taken = [stages[1].send_heartbeat(step_id) for step_id in range(1000)]
    assert not all(taken), "who reports with it must know that it was dropped"
    assert time.monotonic() - started < DEADLINE_S, "a heartbeat waited: a thousand waits take 200 s"


def test_silence_ends_with_any_message_of_the_driver(driver: DriverChannel, stages: list[StageChannel]) -> None:
    assert stages[0].receive(0.05) is None
    assert stages[0].silence_s > 0.05
    driver.send_heartbeat()
    silent = stages[0].silence_s
    ends = time.monotonic() + DEADLINE_S
    while stages[0].silence_s >= silent and time.monotonic() < ends:
        assert stages[0].receive(0.01) is None, "a heartbeat is not a plan"
    assert stages[0].silence_s < silent


def test_waiting_for_a_plan_leaves_the_processor_and_the_gil_to_others(
    driver: DriverChannel, stages: list[StageChannel]
) -> None:
    ticks = 0

    def tick() -> None:
        nonlocal ticks
        while not done.wait(0.005):
            ticks += 1

    done = threading.Event()
    ticker = threading.Thread(target=tick)
    ticker.start()
    spent = time.process_time()
    assert stages[0].receive(0.3) is None
    spent = time.process_time() - spent
    done.set()
    ticker.join()
    assert ticks > 3
    assert spent < 0.15


def test_close_is_quick_with_messages_nobody_takes_and_leaves_no_file(folder: Path) -> None:
    driver = DriverChannel([f"ipc://{folder}/plans"], f"ipc://{folder}/results", send_timeout_s=0.2)
    stage = StageChannel(0, driver.stage_addresses[0], driver.result_address, num_stages=1)
    assert len(list(folder.iterdir())) == 2
    with pytest.raises(DeadlineError):  # noqa: PT012 - how many it takes is zmq's affair
        while True:
            driver.send_plan(bytes(1 << 20))
    started = time.monotonic()
    driver.close()
    stage.close()
    assert time.monotonic() - started < DEADLINE_S / 2
    assert list(folder.iterdir()) == []


def test_a_full_queue_is_not_waited_for_once_the_stage_is_known_to_be_dead(folder: Path) -> None:
    asked: list[None] = []
    driver = DriverChannel([f"ipc://{folder}/plans"], f"ipc://{folder}/results", send_timeout_s=10 * DEADLINE_S)
    started = time.monotonic()
    with pytest.raises(DeadlineError):  # noqa: PT012 - how many it takes is zmq's affair
        while True:
            driver.send_plan(b"", is_over=lambda: bool(asked.append(None)) or len(asked) > 2)
    assert time.monotonic() - started < DEADLINE_S
    driver.close()


def test_a_stage_whose_driver_is_gone_closes_quickly(folder: Path) -> None:
    stage = StageChannel(0, f"ipc://{folder}/a", f"ipc://{folder}/b")
    stage.send_result(b"result")
    started = time.monotonic()
    stage.close()
    assert time.monotonic() - started < DEADLINE_S / 2


def test_a_stage_that_was_told_to_end_waits_for_nobody_when_it_closes(folder: Path) -> None:
    stage = StageChannel(0, f"ipc://{folder}/a", f"ipc://{folder}/b")
    stage.send_heartbeat(1)
    started = time.monotonic()
    stage.close(delivers=False)
    assert time.monotonic() - started < 0.4  # others linger for 0.5 s


def test_the_last_words_of_a_stage_arrive(folder: Path) -> None:
    driver = DriverChannel([f"ipc://{folder}/plans"], f"ipc://{folder}/results")
    stage = StageChannel(0, driver.stage_addresses[0], driver.result_address, num_stages=1)
    stage.send_error({"error": "x" * (1 << 22)})
    stage.close()
    assert [type(message) for message in driver.receive(DEADLINE_S)] == [StageError]
    driver.close()


def test_an_address_that_cannot_be_bound_is_named(folder: Path) -> None:
    too_long = f"ipc://{folder}/{'x' * 120}"
    with pytest.raises(ResourceError, match="cannot be bound") as caught:
        DriverChannel([f"ipc://{folder}/a", too_long], f"ipc://{folder}/b")
    assert too_long in str(caught.value)


def test_a_queue_that_was_emptied_has_room_at_once(folder: Path) -> None:
    # zmq learns late that a message was taken, and may call an empty queue full.
    driver = DriverChannel([f"ipc://{folder}/plans"], f"ipc://{folder}/results")
    stage = StageChannel(0, driver.stage_addresses[0], driver.result_address, num_stages=1)
    for length in range(1, 100):
        for _ in range(length):
            driver.send_plan(b"plan")
            assert isinstance(stage.receive(DEADLINE_S), memoryview)
        driver.send_stop()
        assert stage.receive(DEADLINE_S) == Stop()
    for step_id in range(2000):
        stage.send_heartbeat(step_id)
        assert [m.step_id for m in driver.receive(DEADLINE_S) if isinstance(m, Heartbeat)] == [step_id]
    stage.close()
    driver.close()


def test_an_encrypted_channel_lets_in_only_who_was_told_its_key() -> None:
    anywhere = "tcp://127.0.0.1:*"
    with ExitStack() as stack:
        driver = stack.enter_context(closing(DriverChannel([anywhere], anywhere, encrypted=True)))
        other_key = stack.enter_context(closing(DriverChannel([anywhere], anywhere, encrypted=True)))

        def connect(server_key: bytes | None) -> StageChannel:
            ends = driver.stage_addresses[0], driver.result_address
            stage = StageChannel(0, *ends, num_stages=1, server_key=server_key, send_timeout_s=0.2)
            return stack.enter_context(closing(stage))

        for key in (None, other_key.server_key):
            stranger = connect(key)
            with suppress(DeadlineError):  # it may have been refused by now
                stranger.send_result(b"stranger")
            with pytest.raises(DeadlineError, match="cannot connect"):
                stranger.await_driver(0.2)
        stage = connect(driver.server_key)
        stage.await_driver(DEADLINE_S)
        stage.send_result(b"stage")
        [message] = take(driver, 1)
        assert isinstance(message, StageResult)
        assert bytes(message.payload) == b"stage"
        for step_id in range(10):  # were a stranger connected, it would get its share
            driver.send_plan(bytes([step_id]))
            plan = stage.receive(DEADLINE_S)
            assert isinstance(plan, memoryview)
            assert bytes(plan) == bytes([step_id])
        assert driver.receive(0.2) == []


@pytest.mark.parametrize("is_in_cycle", [True, False])
def test_channels_that_nobody_closed_hold_up_nothing(is_in_cycle: bool) -> None:
    """As an error leaves them, with its traceback, and with a message that nobody will take."""
    anywhere = "tcp://127.0.0.1:*"
    driver = DriverChannel([anywhere], anywhere, encrypted=True)
    stage = StageChannel(0, driver.stage_addresses[0], driver.result_address, num_stages=1)
    stage.send_result(b"in vain")
    if is_in_cycle:
        driver.itself, stage.itself = driver, stage  # type: ignore[attr-defined]
    started = time.monotonic()
    del stage, driver
    gc.collect()
    assert time.monotonic() - started < DEADLINE_S / 2

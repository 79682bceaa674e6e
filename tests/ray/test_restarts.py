"""An engine whose parts are killed or stopped is started again by its owner, and nothing is left of the old one.

RESTART_KILLS=60 adds as many deaths at random moments, of starts, too.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import raw_client
import ray
from engine_listener import WAIT_S, EngineListener
from leftovers import actor_processes, meeting_places, raypp_processes, wait_until_gone
from raw_client import RawClient

from raypp.actors.engine_actors import EngineHandle, launch_engine
from raypp.config.engine_config import EngineConfig
from raypp.errors import EngineDeadError, StageDiedError
from raypp.testing import FakeStage
from raypp.tracing import read_chrome_trace

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

NUM_KILLS = int(os.environ.get("RESTART_KILLS", "0"))
PROMPT = [1]
TOKENS = list(range(2, 14))


@contextmanager
def running(listener: EngineListener, **settings: object) -> Iterator[EngineHandle]:
    """Have an engine run, and check that nothing is left of it, or of its earlier lives, when it is closed."""
    config = EngineConfig.from_flat(
        "tiny", num_stages=2, step_timeout_s=1.0, heartbeat_s=0.1, close_timeout_s=3.0, **settings
    )
    before = raypp_processes()
    handle = launch_engine(config, stage_factory=FakeStage(step_ms=2))
    try:
        handle.watch(listener)
        yield handle
    finally:
        handle.close()
    assert not wait_until_gone(raypp_processes() - before, 1.0)
    assert {group["state"] for group in ray.util.placement_group_table().values()} == {"REMOVED"}


def pids_of(handle: EngineHandle) -> list[int]:
    processes = handle.processes()
    return [processes["driver"], *processes["stages"]]


def send(number: int, *pids: int) -> Callable[[], None]:
    return lambda: [os.kill(pid, number) for pid in pids] and None


def check_served(handle: EngineHandle) -> None:
    with RawClient(handle.client_address) as client:
        one = client.add(PROMPT)
        client.wait([one])
        assert client.tokens[one] == TOKENS


def wait_for_process(name: str, but: set[int]) -> int:
    ends = time.monotonic() + WAIT_S
    while time.monotonic() < ends:
        for pid, of in actor_processes().items():
            if of == name and pid not in but:
                return pid
        time.sleep(0.005)
    raise AssertionError(f"never: a process of {name}")


@pytest.mark.full
def test_what_dies_or_stands_still_is_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    listener, trace = EngineListener(), folder / "trace.json"
    with running(listener, max_engine_restarts=3, trace=str(trace)) as engine:
        addresses = []

        def dies(number: int, *victims: int) -> None:
            check_served(engine)
            addresses.append(engine.client_address)
            old = pids_of(engine)
            listener.hears("lost", "back", after=send(number, *(old[victim] for victim in victims)))
            gone = {old[0], *(old[victim] for victim in victims)}
            assert not wait_until_gone(gone, 0.0), "ended before the next life begins"
            assert engine.client_address not in addresses
            new = set(pids_of(engine))
            assert not new & gone
            assert set(old) - gone < new, "stages that live are kept"
            assert engine.recoveries()[-1].last_start.num_kept_stages == len(old) - len(gone)

        dies(signal.SIGKILL, 0, 2)
        dies(signal.SIGSTOP, 1)
        check_served(engine)
        driver = pids_of(engine)[0]
        os.kill(driver, signal.SIGSTOP)  # which only a client notices
        frozen = EngineDeadError("the driver is frozen", silent_s=1.5)
        address = engine.client_address
        listener.hears("lost", "back", after=lambda: engine.report_death(frozen, address))
        engine.report_death(frozen, address)  # of a client that is late
        check_served(engine)
        recoveries = engine.recoveries()
    print(*recoveries, sep="\n")
    assert [recovery.num_starts for recovery in recoveries] == [1] * 3
    assert "the driver died" in recoveries[0].died
    assert "stage 0 is frozen" in recoveries[1].died
    assert recoveries[1].notice_s >= 1.0
    assert recoveries[2].notice_s >= 1.5
    assert listener.words == ["lost", "back"] * 3
    assert not meeting_places(folder)
    lanes = read_chrome_trace(folder / "trace-2.json")
    assert lanes[0].name == "driver", "of a life that has died there is a trace, too"
    assert trace.exists()


@pytest.mark.full
def test_a_death_while_it_starts_and_one_too_many() -> None:
    listener = EngineListener()
    with running(listener, max_engine_restarts=2) as engine:
        before = raypp_processes()

        def kill_twice() -> None:
            os.kill(pids_of(engine)[1], signal.SIGKILL)
            os.kill(wait_for_process("StageActor", before), signal.SIGKILL)

        listener.hears("lost", "back", after=kill_twice)
        check_served(engine)
        assert [recovery.num_starts for recovery in engine.recoveries()] == [2]
        listener.hears("dead", after=send(signal.SIGKILL, pids_of(engine)[2]))
        error = listener.errors[-1]
        assert isinstance(error, StageDiedError)
        assert error.stage_index == 1


def test_an_engine_is_closed_while_it_restarts() -> None:
    listener = EngineListener()
    with running(listener, max_engine_restarts=1) as engine:
        old = set(pids_of(engine))
        os.kill(pids_of(engine)[0], signal.SIGKILL)
        wait_for_process("DriverActor", old)
        began = time.monotonic()
        engine.close()
        took_s = time.monotonic() - began
    assert took_s < 5.0
    assert listener.words == ["lost"]


@pytest.mark.skipif(not NUM_KILLS, reason="takes long; set RESTART_KILLS")
def test_a_stage_that_is_stopped_while_it_starts_is_replaced() -> None:
    listener = EngineListener()
    with running(listener, max_engine_restarts=2, start_timeout_s=300.0) as engine:
        before = raypp_processes()

        def stop_the_next() -> None:
            os.kill(pids_of(engine)[1], signal.SIGKILL)
            pid = wait_for_process("StageActor", before)
            while pid not in {process.pid for process in engine._pool.processes.values()}:
                time.sleep(0.005)  # it has not said which process it is
            os.kill(pid, signal.SIGSTOP)

        began = time.monotonic()
        listener.hears("lost", "back", after=stop_the_next)
        check_served(engine)
        print(f"\na stage is stopped while it starts: {time.monotonic() - began:.1f} s, {engine.recoveries()}")
        assert [recovery.num_starts for recovery in engine.recoveries()] == [2]


@pytest.mark.skipif(not NUM_KILLS, reason="RESTART_KILLS says how many")
def test_deaths_at_random_moments(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(raw_client, "WAIT_S", 5.0)
    rng, listener = random.Random(os.environ.get("FAULT_SEED", "kill -9")), EngineListener()
    others = raypp_processes()
    with running(listener, max_engine_restarts=1000) as engine:
        for _ in range(NUM_KILLS):
            if rng.random() < 0.5:
                _wait_until_served(engine)
            time.sleep(rng.uniform(0.0, 3.0))
            alive = sorted(raypp_processes() - others)
            for pid in rng.sample(alive, min(len(alive), rng.choice((1, 1, 2)))):
                os.kill(pid, signal.SIGKILL)
        _wait_until_served(engine)
        recoveries = engine.recoveries()
        assert not wait_until_gone(raypp_processes() - others - set(pids_of(engine)), 1.0)
    pauses_s = sorted(recovery.total_s for recovery in recoveries)
    print(f"\n{len(recoveries)} recoveries, {sum(r.num_starts for r in recoveries)} starts after {NUM_KILLS} kills")
    print(f"pauses: median {pauses_s[len(pauses_s) // 2]:.1f} s, longest {pauses_s[-1]:.1f} s")
    assert "dead" not in listener.words
    assert not meeting_places(folder)


def _wait_until_served(engine: EngineHandle) -> None:
    """Wait until the engine answers: what it says of itself may be a moment old."""
    ends = time.monotonic() + WAIT_S
    while time.monotonic() < ends:
        try:
            check_served(engine)
        except (AssertionError, EngineDeadError):
            continue
        return
    raise AssertionError("never: an engine that serves")

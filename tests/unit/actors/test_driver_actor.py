"""The driver's actor, with doubles in place of what it starts."""

import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq

from raypp.actors.driver_actor import DriverActor
from raypp.actors.placement import BundlePlace, Placement
from raypp.config.engine_config import EngineConfig
from raypp.errors import DeadlineError
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.step_channel import StageChannel
from raypp.tracing import TraceEvent

WAIT_S = 20.0


class MortalStages:
    """Two stages that tell their trace as long as they live; the first question is answered when the test says so."""

    def __init__(self) -> None:
        self.asked, self.may_answer = threading.Event(), threading.Event()
        self.is_dead = False

    def traces(self):
        is_first = not self.asked.is_set()
        self.asked.set()
        if is_first:
            assert self.may_answer.wait(WAIT_S)
        return [None if self.is_dead else [TraceEvent("forward", 0, 1, 2)]] * 2

    def leave(self) -> None:
        self.is_dead = True

    def run(self, *_args) -> None:
        pass

    def await_end(self, *_args) -> None:
        pass


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="raypp") as folder:  # pytest's own are too long for a socket's path
        yield Path(folder)


def test_no_stage_is_left_while_it_is_asked_for_its_trace(tmp_path):
    config = EngineConfig.from_flat("tiny", num_stages=2, trace=str(tmp_path / "trace.json"))
    plan = plan_engine(config, Hardware(4))
    actor = DriverActor(plan, cast(Placement, None), str(tmp_path / "meeting"))
    stages, served, lanes = MortalStages(), threading.Event(), []
    nothing = SimpleNamespace(
        serve=served.set, close=lambda: None, fail=lambda *_: None
    )  # a server, a pipeline, sockets: whatever is asked of them is done at once
    actor._stages, actor._encoders = stages, None
    actor._server = actor._pipeline = actor._clients = nothing

    asker = threading.Thread(target=lambda: lanes.extend(actor.trace()))
    asker.start()
    assert stages.asked.wait(WAIT_S)
    ender = threading.Thread(target=actor.run)  # the engine ends while that question is on its way
    ender.start()
    assert served.wait(WAIT_S)
    ender.join(0.2)  # as far as it comes
    stages.may_answer.set()
    for thread in (asker, ender):
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert [lane.name for lane in lanes] == ["driver", "stage 0", "stage 1"]
    assert [lane.name for lane in actor.trace()] == ["driver", "stage 0", "stage 1"], "kept when all have ended"
    assert stages.is_dead


@pytest.mark.parametrize("is_on_one_node", [True, False])
def test_steps_cross_the_network_only_encrypted(folder, is_on_one_node):
    nodes = ["here", "here" if is_on_one_node else "there"]
    places = tuple(BundlePlace(index, node_id) for index, node_id in enumerate(nodes))
    # Both nodes are this machine.
    placement = Placement(cast(Any, None), "here", places, (), dict.fromkeys(nodes, "127.0.0.1"))
    plan = plan_engine(EngineConfig.from_flat("tiny", num_stages=2), Hardware(4))
    actor = DriverActor(plan, placement, str(folder))
    actor._context = zmq.Context()
    channel = actor._open_step_channel(2)
    addresses = [*channel.stage_addresses, channel.result_address]
    patience_s = WAIT_S if is_on_one_node else 0.2
    stranger = StageChannel(0, addresses[0], addresses[-1], num_stages=2, send_timeout_s=patience_s)
    try:
        assert {address.partition(":")[0] for address in addresses} == {"ipc" if is_on_one_node else "tcp"}
        assert (channel.server_key is None) == is_on_one_node
        with suppress(DeadlineError):  # it may have been refused by now
            stranger.send_result(b"stranger")
        assert bool(channel.receive(patience_s)) == is_on_one_node
    finally:
        stranger.close()
        channel.close()
        actor._context.destroy(linger=0)

"""The engine in threads dies and comes back as the real one does."""

from __future__ import annotations

import threading

import zmq

from raypp.client_messages import OpenClient, StatsCall, StatsReply, decode_driver_message, encode_client_message
from raypp.config.engine_config import EngineConfig
from raypp.errors import RayppError, StageDiedError
from raypp.testing import FakeStage, launch_in_threads

WAIT_S = 30.0


class Listener:
    def __init__(self) -> None:
        self.errors: list[RayppError] = []
        self.back, self.dead = threading.Event(), threading.Event()

    def engine_lost(self, error: RayppError) -> None:
        self.errors.append(error)

    def engine_back(self, client_address: str, *, is_explained: bool) -> None:
        self.back.set()

    def engine_dead(self, error: RayppError) -> None:
        self.errors.append(error)
        self.dead.set()


def is_served(address: str) -> bool:
    """Return whether a driver answers there."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        client.connect(address)
        for message in (OpenClient(), StatsCall(7)):
            client.send_multipart(encode_client_message(message))
        while client.poll(round(WAIT_S * 1000)):
            match decode_driver_message(client.recv_multipart()):
                case StatsReply(7, _):
                    return True
    return False


def test_a_dead_engine_serves_again_at_another_address() -> None:
    config = EngineConfig.from_flat("tiny", num_stages=2, max_engine_restarts=1)
    threads, listener = set(threading.enumerate()), Listener()
    engine = launch_in_threads(config, stage_factory=FakeStage(step_ms=1))
    try:
        engine.watch(listener)
        first = engine.client_address
        assert is_served(first)
        engine.kill_stage(1)
        assert listener.back.wait(WAIT_S)
        assert engine.client_address != first
        assert is_served(engine.client_address)
        assert len(engine.recoveries()) == 1
        engine.kill_stage(0)
        assert listener.dead.wait(WAIT_S)
    finally:
        engine.close()
    assert [type(error) for error in listener.errors] == [StageDiedError] * 2
    assert not [thread for thread in threading.enumerate() if thread not in threads]

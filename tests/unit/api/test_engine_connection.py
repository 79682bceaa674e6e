"""What a connection tells of the deaths of its engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from fake_engine import FakeEngine

from raypp.api.engine_connection import EngineConnection
from raypp.client_messages import DriverMessage
from raypp.config.engine_config import EngineConfig
from raypp.errors import RayppError, StageDiedError

DIED = StageDiedError("stage 1 died", stage_index=1)


class Told:
    """Keeps what a connection tells."""

    def __init__(self) -> None:
        self.num_messages = self.num_losses = 0
        self.in_flight: list[Collection[int] | None] = []

    def on_message(self, message: DriverMessage) -> None:
        self.num_messages += 1

    def on_lost(self, error: RayppError | None) -> None:
        self.num_losses += 1

    def on_back(self, in_flight: Collection[int] | None, *, is_explained: bool) -> None:
        self.in_flight.append(in_flight)

    def on_dead(self, error: RayppError) -> None:
        raise AssertionError(error)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


def test_what_was_in_flight_is_told_of_the_last_death_alone(make_engine: Callable[..., FakeEngine]) -> None:
    engine = make_engine(recovers=True)
    config = EngineConfig.from_flat("tiny")
    engine.launch(config)

    async def body() -> None:
        told = Told()
        connection = EngineConnection(engine, config.faults, told)
        await until(lambda: bool(engine._known_clients))
        engine.die_loudly(DIED)  # the driver says what was in flight
        await until(lambda: told.num_losses == 1)
        engine.come_back()
        await until(lambda: len(told.in_flight) == 1)
        engine.die_unseen(DIED)  # nobody says it
        await until(lambda: told.num_losses == 2)
        engine.come_back()
        await until(lambda: len(told.in_flight) == 2)
        connection.close()
        assert told.in_flight == [[], None]

    asyncio.run(body())

"""Streams of server-sent events that have to wait: what is told by a status, what by an event, and what by comments."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from raypp.errors import EngineDeadError, RequestError
from serve_app.answers import KEEP_ALIVE, EventStream

KEEP_ALIVE_S = 0.02


class Client:
    """The other end of a connection, which stays."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.num_sent = asyncio.Condition()

    async def receive(self) -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(self, message: Any) -> None:
        async with self.num_sent:
            self.messages.append(message)
            self.num_sent.notify_all()

    @property
    def text(self) -> str:
        return "".join(message.get("body", b"").decode() for message in self.messages)

    async def saw(self, text: str, times: int = 1) -> None:
        async with self.num_sent, asyncio.timeout(20):
            await self.num_sent.wait_for(lambda: self.text.count(text) >= times)


async def events_after(ready: asyncio.Event, *events: str | Exception) -> AsyncGenerator[str, None]:
    await ready.wait()
    for event in events:
        if isinstance(event, Exception):
            raise event
        yield event


async def respond(client: Client, events: AsyncGenerator[str, None]) -> None:
    response = await EventStream.opened(client.receive, events, KEEP_ALIVE_S)
    await response({"type": "http"}, client.receive, client.send)


def test_comments_go_out_while_there_is_no_event() -> None:
    async def body() -> None:
        client, ready = Client(), asyncio.Event()
        task = asyncio.create_task(respond(client, events_after(ready, "data: 1\n\n", "data: 2\n\n")))
        await client.saw(KEEP_ALIVE, times=3)
        assert client.messages[0]["status"] == 200
        ready.set()
        await task
        assert client.text.replace(KEEP_ALIVE, "") == "data: 1\n\ndata: 2\n\n"
        assert client.messages[-1] == {"type": "http.response.body", "body": b"", "more_body": False}

    asyncio.run(body())


def test_comments_go_out_between_events_too() -> None:
    async def body() -> None:
        client, ready = Client(), asyncio.Event()

        async def events() -> AsyncGenerator[str, None]:
            yield "data: 1\n\n"
            await ready.wait()
            yield "data: 2\n\n"

        task = asyncio.create_task(respond(client, events()))
        await client.saw("data: 1\n\n" + KEEP_ALIVE)
        ready.set()
        await task
        assert client.text.endswith("data: 2\n\n")

    asyncio.run(body())


def test_a_refusal_is_told_by_a_status() -> None:
    async def body() -> None:
        client, ready = Client(), asyncio.Event()
        ready.set()
        with pytest.raises(RequestError, match="too long"):
            await respond(client, events_after(ready, RequestError("too long")))
        assert not client.messages

    asyncio.run(body())


def test_what_comes_up_later_is_an_event() -> None:
    async def body() -> None:
        client, ready = Client(), asyncio.Event()
        task = asyncio.create_task(respond(client, events_after(ready, EngineDeadError("the engine died"))))
        await client.saw(KEEP_ALIVE)
        ready.set()
        await task
        last = client.text.replace(KEEP_ALIVE, "")
        assert last.startswith('data: {"error":{"message":"the engine died"')
        assert "DONE" not in last

    asyncio.run(body())

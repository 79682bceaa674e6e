"""What a client gets from Serve's proxy when no replica answers, or dies while it does."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from openai.types.responses import ResponseErrorEvent
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.prefix_keys import PrefixKeys
from serve_app.proxy_answers import ENVIRONMENT, ProxyAnswers, middlewares

TIMEOUT_S = 0.02


def start(content_type: str, status: int = 200) -> Message:
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", content_type.encode())]}


def piece(body: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


def proxy(*messages: Message, ends: bool = True, takes_cancellation: bool = False) -> ASGIApp:
    """Return what sends messages, as Serve's proxy does, and then returns or waits for a replica."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)
        if ends:
            return
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if not takes_cancellation:
                raise

    return app


def ask(app: ASGIApp, path: str, method: str = "GET") -> list[Message]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope: dict[str, Any] = {"type": "http", "method": method, "path": path, "headers": []}
    asyncio.run(asyncio.wait_for(ProxyAnswers(app, TIMEOUT_S)(scope, receive, send), 5.0))
    return sent


def error_of(sent: list[Message]) -> tuple[int, str, str]:
    """Return status, Retry-After and code of a whole answer."""
    head, body = sent
    headers = dict(head["headers"])
    assert headers[b"content-type"] == b"application/json"
    return head["status"], headers[b"retry-after"].decode(), json.loads(body["body"])["error"]["code"]


@pytest.mark.parametrize("takes_cancellation", [False, True])
@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/health"), ("HEAD", "/health"), ("GET", "/second/health"), ("GET", "/ping"), ("GET", "/ready")],
)
def test_health_is_told_while_there_is_no_replica(method: str, path: str, takes_cancellation: bool) -> None:
    waiting = proxy(ends=False, takes_cancellation=takes_cancellation)
    began = time.monotonic()
    assert error_of(ask(waiting, path, method)) == (503, "3", "unhealthy")
    assert time.monotonic() - began < 2.0


def test_other_requests_wait_for_the_next_replica() -> None:
    async def late(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(3 * TIMEOUT_S)
        await send(start("application/json"))
        await send(piece(b"{}", more=False))

    assert [message.get("status") for message in ask(late, "/v1/completions", "POST")] == [200, None]
    assert ask(late, "/health")[0]["status"] == 503


def test_an_answer_about_health_that_has_begun_may_take_its_time() -> None:
    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start("application/json"))
        await asyncio.sleep(3 * TIMEOUT_S)
        await send(piece(b"{}", more=False))

    assert ask(slow, "/health") == [start("application/json"), piece(b"{}", more=False)]


@pytest.mark.parametrize("path", ["/v1/completions", "/health"])
def test_a_request_whose_replica_died_is_told_so(path: str) -> None:
    assert error_of(ask(proxy(), path)) == (503, "3", "engine_dead")


def with_routes(routes: bytes, content_type: str) -> ASGIApp:
    """Return a proxy that finds nothing under any path but its own list of routes."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        is_list = scope["path"].endswith("/-/routes")
        await send(start("application/json") if is_list else start(content_type, 404))
        await send(piece(routes if is_list else b"not found", more=False))

    return app


@pytest.mark.parametrize("routes", [b"{}", b"Route table is not populated yet."])
@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/"), ("GET", "/health"), ("POST", "/x/y")],
)
def test_without_an_application_every_route_says_to_come_back(method: str, path: str, routes: bytes) -> None:
    assert error_of(ask(with_routes(routes, "text/plain"), path, method)) == (503, "3", "engine_dead")


def test_without_an_application_a_message_is_refused_in_its_own_form() -> None:
    head, body = ask(with_routes(b"{}", "text/plain"), "/v1/messages", "POST")
    assert (head["status"], json.loads(body["body"])["error"]["type"]) == (503, "overloaded_error")


@pytest.mark.parametrize("content_type", ["text/plain", "application/json"])
def test_where_there_are_applications_a_404_is_as_it_was(content_type: str) -> None:
    sent = ask(with_routes(b'{"/second":"second"}', content_type), "/v1/models")
    assert sent == [start(content_type, 404), piece(b"not found", more=False)]


def test_a_cut_stream_ends_with_an_event_that_says_so() -> None:
    begun = [start("text/event-stream; charset=utf-8"), piece(b'data: {"choices":[]}\n\n', more=True)]
    *passed, last = ask(proxy(*begun), "/v1/completions", "POST")
    assert passed == begun
    assert not last["more_body"]
    assert json.loads(last["body"].removeprefix(b"data: "))["error"]["code"] == "engine_dead"


def response_event(kind: str, number: int, **fields: Any) -> bytes:
    data = {"type": kind, **fields, "sequence_number": number}
    return f"event: {kind}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


CREATED = response_event("response.created", 0, response={"metadata": {"sequence_number": "77"}})
SAYS_SO = response_event("response.output_text.delta", 9, delta='"sequence_number":99')


@pytest.mark.parametrize(
    ("bodies", "number"),
    [
        ([], 0),
        ([b": waiting\n\n"], 0),
        ([CREATED], 1),
        ([CREATED + response_event("response.in_progress", 1)], 2),
        ([CREATED, SAYS_SO, b": waiting\n\n"], 10),
    ],
)
def test_a_cut_stream_of_a_response_ends_with_an_event_of_its_own_form(bodies: list[bytes], number: int) -> None:
    begun = [start("text/event-stream; charset=utf-8"), *(piece(body, more=True) for body in bodies)]
    *passed, last = ask(proxy(*begun), "/second/v1/responses", "POST")
    assert passed == begun
    assert not last["more_body"]
    name, data = last["body"].decode().removesuffix("\n\n").split("\n")
    event = json.loads(data.removeprefix("data: "))
    assert "the replica ended" in event.pop("message")
    assert name == "event: error"
    assert event == {"type": "error", "code": "engine_dead", "param": None, "sequence_number": number}
    ResponseErrorEvent.model_validate({**event, "message": ""}, strict=True)


def test_a_cut_stream_of_a_message_ends_with_an_event_of_its_own_form() -> None:
    begun = [start("text/event-stream; charset=utf-8"), piece(b"event: message_start\ndata: {}\n\n", more=True)]
    *_, last = ask(proxy(*begun), "/second/v1/messages", "POST")
    name, data = last["body"].decode().removesuffix("\n\n").split("\n")
    event = json.loads(data.removeprefix("data: "))
    assert (name, event["type"], event["error"]["type"]) == ("event: error", "error", "overloaded_error")
    head, body = ask(proxy(), "/second/v1/messages", "POST")
    assert head["status"] == 503
    assert dict(head["headers"])[b"content-length"] == str(len(body["body"])).encode()
    assert json.loads(body["body"]) == event


@pytest.mark.parametrize(
    "messages",
    [
        [start("text/event-stream"), piece(b"data: [DONE]\n\n", more=True), piece(b"", more=False)],
        [start("application/json", 503), piece(b"{}", more=False)],
        [start("application/json"), piece(b'{"cut', more=True)],  # its length was announced: the connection is closed
    ],
)
def test_other_answers_are_as_they_were(messages: list[Message]) -> None:
    assert ask(proxy(*messages), "/v1/completions") == messages


def test_serve_finds_it_by_the_environment() -> None:
    (place,) = ENVIRONMENT.values()
    assert place == f"{middlewares.__module__}:{middlewares.__name__}"
    assert [middleware.cls for middleware in middlewares()] == [ProxyAnswers, PrefixKeys]

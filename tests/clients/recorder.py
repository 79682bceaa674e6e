"""Records what a client sends to the app and the shape of what it gets: an ASGI middleware, and the files' format.

A recording is a JSON file: the client, its packages' versions, and its exchanges in order. An exchange has the request
as it was sent, without the headers that name a machine or hold a key, and the status and the shape of the answer. A
shape maps each place in the JSON to the types seen there; a stream's is that of all its events.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

RECORDINGS = Path(__file__).parent / "recordings"
ENGINE = {"max_model_len": 4096, "kv_cache_bytes": 1 << 25}
"""Of the app that clients are recorded against and replayed to: conversations with tools are long."""

_KEPT_HEADERS = (
    "content-type",
    "content-encoding",
    "accept",
    "openai-beta",
    "anthropic-version",
    "anthropic-beta",
    "idempotency-key",
    "x-request-id",
)
_LAST_EVENTS = ("response.completed", "response.incomplete", "message_stop")
_MAPS = ".logprobs.top_logprobs[]"  # of /v1/completions: its keys are tokens

Shape = dict[str, str]
"""Place to types, joined by `|`. Places are written `.choices[].index`."""


class Recorder:
    """Passes everything on, and keeps what passes."""

    def __init__(self, app: ASGIApp, exchanges: list[dict[str, Any]]) -> None:
        """Stand in front of an app.

        Args:
            app: What answers.
            exchanges: Gets one more with every request.
        """
        self._app = app
        self._exchanges = exchanges

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and keep it with its answer."""
        if scope["type"] != "http" or scope["method"] == "HEAD":  # which only asks whether there is a server
            await self._app(scope, receive, send)
            return
        sent, got = bytearray(), bytearray()
        answer: dict[str, Any] = {}

        async def hear() -> Message:
            message = await receive()
            sent.extend(message.get("body", b""))
            return message

        async def say(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
                answer.update(status=message["status"], content_type=headers.get("content-type", "").split(";")[0])
            got.extend(message.get("body", b""))
            await send(message)

        exchange: dict[str, Any] = {}
        self._exchanges.append(exchange)  # in the order in which requests come
        await self._app(scope, hear, say)
        headers = {name.decode().lower(): value.decode() for name, value in scope["headers"]}
        exchange.update(
            method=scope["method"],
            path=scope["path"],
            headers={name: headers[name] for name in _KEPT_HEADERS if name in headers},
            body=json.loads(sent) if sent else None,
            answer={**answer, "shape": shape_of(answer_values(answer["content_type"], got.decode()))},
        )


def answer_values(content_type: str, text: str) -> list[Any]:
    """Return the JSON of an answer: one value, or those of a stream's events.

    Raises:
        ValueError: it is no JSON, or a stream that ends neither with `[DONE]` nor with a whole response or message.
    """
    if content_type != "text/event-stream":
        return [json.loads(text)]
    events = [event for event in text.split("\n\n") if event and not event.startswith(":")]
    data = [event.partition("data: ")[2] for event in events]
    if data and data[-1] == "[DONE]":
        return [json.loads(value) for value in data[:-1]]
    values = [json.loads(value) for value in data]
    if not values or values[-1].get("type") not in _LAST_EVENTS:
        raise ValueError(f"a stream ends with {data[-1:]}, not with [DONE] or a whole response")
    return values


def shape_of(values: list[Any]) -> Shape:
    """Return which types of values stand where, in all of these together."""
    shape: dict[str, set[str]] = {}
    for value in values:
        _add_shape(shape, "", value)
    return {place: "|".join(sorted(types)) for place, types in shape.items()}


def missing(recorded: Shape, now: Shape) -> list[str]:
    """Return what a client that got the recorded answer would miss or misread in the present one. More is no fault.

    Another place is more, and so is a value where there was none.
    """
    lines = [f"{place} is gone" for place in recorded if place not in now]
    for place, types in now.items():
        known = recorded.get(place, types)
        if known != "null" and (unknown := set(types.split("|")) - set(known.split("|"))):
            lines.append(f"{place} is {sorted(unknown)}, not {recorded[place]}")
    return lines


def save(client: str, packages: dict[str, str], exchanges: list[dict[str, Any]]) -> Path:
    """Write a recording, a line for each exchange and each shape; return where it is."""
    path = RECORDINGS / f"{client}.json"
    shapes: list[Shape] = []
    lines = []
    for exchange in exchanges:
        shape = exchange["answer"]["shape"]
        if shape not in shapes:
            shapes.append(shape)
        answer = {**exchange["answer"], "shape": shapes.index(shape)}
        if (line := json.dumps({**exchange, "answer": answer})) not in lines:
            lines.append(line)
    parts = [
        f'"client": {json.dumps(client)}',
        f'"packages": {json.dumps(packages)}',
        '"shapes": [\n  ' + ",\n  ".join(map(json.dumps, shapes)) + "\n ]",
        '"exchanges": [\n  ' + ",\n  ".join(lines) + "\n ]",
    ]
    path.write_text("{\n " + ",\n ".join(parts) + "\n}\n")
    return path


def load(client: str) -> dict[str, Any]:
    """Return a recording, with the shape of each answer in it."""
    recording: dict[str, Any] = json.loads((RECORDINGS / f"{client}.json").read_text())
    for exchange in recording["exchanges"]:
        exchange["answer"]["shape"] = recording["shapes"][exchange["answer"]["shape"]]
    return recording


def _add_shape(shape: dict[str, set[str]], place: str, value: Any) -> None:
    shape.setdefault(place, set()).add(_type_of(value))
    if isinstance(value, list):
        for element in value:
            _add_shape(shape, f"{place}[]", element)
    elif isinstance(value, dict):
        for key, element in value.items():
            _add_shape(shape, f"{place}.{'*' if place.endswith(_MAPS) else key}", element)


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    kinds = {str: "string", int: "number", float: "number", list: "array", dict: "object"}
    return kinds[type(value)]

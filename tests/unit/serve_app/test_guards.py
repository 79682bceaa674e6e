"""Keys, sizes and origins."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest
from running_app import RunningApp, running_app
from starlette.types import Message, Receive, Scope, Send

from raypp.api.tokenizer import Tokenizer
from raypp.errors import RequestError
from raypp.models.registry import resolve_model_path
from raypp.openai_api.body_preparer import BodyPreparer
from serve_app.answers import BodyTooLargeError
from serve_app.http_app import OPEN_PATHS
from serve_app.middleware import BodyLimit

BODY = {"prompt": "x", "max_tokens": 1}


@pytest.fixture(scope="module")
def guarded() -> Iterator[RunningApp]:
    settings = {"api_keys": ["first", "second"], "cors_origins": ["https://good.example"], "max_body_bytes": 2000}
    with running_app(settings, num_stages=1) as app:
        yield app


@pytest.fixture
def door(guarded: RunningApp) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=guarded.url, timeout=30) as client:
        yield client


@pytest.mark.parametrize("authorization", [None, "Bearer wrong", "Basic first", "Bearer", "first", "Bearer first2"])
def test_without_a_valid_key_nothing_is_served(door: httpx.Client, authorization: str | None) -> None:
    headers = {} if authorization is None else {"Authorization": authorization}
    for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/live"), ("POST", "/tokenize")):
        answer = door.request(method, path, json=BODY if method == "POST" else None, headers=headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("key", ["first", "second"])
def test_every_key_opens(door: httpx.Client, key: str) -> None:
    answer = door.post("/v1/completions", json=BODY, headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 200


@pytest.mark.parametrize(("key", "status"), [("second", 200), ("wrong", 401), ("", 401)])
def test_a_key_may_come_as_anthropics_clients_send_it(door: httpx.Client, key: str, status: int) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    answer = door.post("/v1/messages", json=body, headers={"X-API-Key": key})
    assert answer.status_code == status
    if status == 401:
        assert answer.json()["error"]["type"] == "authentication_error"
    answer = door.post("/v1/messages", json={**body, "system": "x" * 5000}, headers={"X-API-Key": "first"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (413, "request_too_large")


def test_monitors_and_the_page_need_none(door: httpx.Client) -> None:
    assert {door.get(path).status_code for path in OPEN_PATHS} == {200}


def test_the_description_says_that_keys_are_needed(door: httpx.Client) -> None:
    description = door.get("/openapi.json").json()
    assert description["paths"]["/v1/completions"]["post"]["security"] == [
        {"HTTPBearer": []},
        {"APIKeyHeader": []},
    ]


@pytest.mark.parametrize("announced", [True, False])
def test_large_bodies_are_refused(door: httpx.Client, announced: bool) -> None:
    content = b'{"prompt": "' + b"x" * 5000 + b'"}'
    headers = {"Authorization": "Bearer first", "Content-Type": "application/json"}
    answer = door.post("/v1/completions", content=content if announced else iter([content]), headers=headers)
    assert answer.status_code == 413
    assert "2000 bytes" in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == "body_too_large"


@pytest.mark.parametrize(("sizes", "num_taken"), [([40, 40, 20], 3), ([40, 40, 21], 2), ([1] * 102, 100), ([101], 0)])
def test_all_parts_of_a_body_count(sizes: list[int], num_taken: int) -> None:
    taken: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        taken.extend([await receive() for _ in sizes[:num_taken]])
        if num_taken < len(sizes):
            with pytest.raises(BodyTooLargeError):
                await receive()

    async def send(message: Message) -> None:
        raise AssertionError(message)

    parts: list[Message] = [{"type": "http.request", "body": bytes(size), "more_body": True} for size in sizes]
    given = iter(parts)

    async def receive() -> Message:
        return next(given)

    asyncio.run(BodyLimit(app, 100)({"type": "http", "headers": []}, receive, send))
    assert taken == parts[:num_taken]


@pytest.mark.parametrize(("origin", "allowed"), [("https://good.example", True), ("https://bad.example", False)])
def test_only_named_origins_may_call(door: httpx.Client, origin: str, allowed: bool) -> None:
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    answer = door.options("/v1/completions", headers=headers)
    assert ("access-control-allow-origin" in answer.headers) == allowed


def test_without_settings_no_origin_may_call(http: httpx.Client) -> None:
    answer = http.get("/version", headers={"Origin": "https://good.example"})
    assert "access-control-allow-origin" not in answer.headers


def test_one_body_cannot_take_the_whole_replica(http: httpx.Client) -> None:
    small = {"prompt": ["x"] * 80, "n": 128, "max_tokens": 200, "ignore_eos": True}
    for body in (small, {**small, "stream": True}, {"prompt": ["x"] * 50_000}):
        answer = http.post("/v1/completions", json=body, timeout=10)
        assert answer.status_code == 400
        assert "at most 256" in answer.json()["error"]["message"]


def test_many_prompts_are_told_by_their_tokens() -> None:
    with running_app({"max_tokens_per_request": 100}, num_stages=1) as app, httpx.Client(base_url=app.url) as http:
        for prompts in (["a b c d"] * 50, [[5] * 51, [5] * 51]):
            answer = http.post("/v1/completions", json={"prompt": prompts, "max_tokens": 1})
            assert answer.status_code == 400
            assert "max_tokens_per_request = 100" in answer.json()["error"]["message"]


def test_a_text_that_cannot_fit_costs_nothing(http: httpx.Client) -> None:
    """Tokenizing these 8 MB would take ten seconds and more."""
    chat = {"messages": [{"role": "user", "content": "x" * 8_000_000}]}
    for path, body in (("/v1/completions", {"prompt": "x" * 8_000_000}), ("/v1/chat/completions", chat)):
        answer = http.post(path, json=body, timeout=5)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_tokenizing_many_texts_lets_others_in() -> None:
    """While a megabyte is tokenized, the event loop goes on."""
    preparer = BodyPreparer(Tokenizer(resolve_model_path("tiny")), None, max_model_len=4096)
    texts = ["def main(argv): pass\n" * 760] * 64

    async def count_turns() -> int:
        num_turns, task = 0, asyncio.ensure_future(preparer.texts(texts))
        while not task.done():
            num_turns += 1
            await asyncio.sleep(0)
        assert len(task.result()) == 64
        return num_turns

    assert asyncio.run(count_turns()) > 64


def test_texts_are_tokenized_no_further_than_they_may_be() -> None:
    tokenizer = Tokenizer(resolve_model_path("tiny"))
    seen: list[int] = []

    def check(num_tokens: int) -> None:
        seen.append(num_tokens)
        if num_tokens > 10_000:
            raise RequestError("enough")

    with pytest.raises(RequestError, match="enough"):
        asyncio.run(BodyPreparer(tokenizer, None, max_model_len=4096).texts(["x y z " * 3000] * 50, check_tokens=check))
    assert len(seen) < 5

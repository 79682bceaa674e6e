"""Which replica a request goes to, and what the proxy reads of it for that."""

from __future__ import annotations

import asyncio
import json
import pickle
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import StreamingHTTPRequest
from starlette.types import Message, Receive, Scope, Send

from serve_app import prefix_router
from serve_app.prefix_keys import MAX_PREFIX_BYTES, SCOPE_KEY, PrefixKeys, covered_bytes, prefix_keys, want_keys
from serve_app.prefix_router import PrefixChoice

CHAT = "/v1/chat/completions"


def text(num_chars: int, seed: int = 0) -> str:
    rng = random.Random(seed)
    return "".join(rng.choices("abcdefgh ", k=num_chars))


def chat(*contents: str, **fields: object) -> bytes:
    roles = ["system", *["user", "assistant"] * len(contents)]
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    return json.dumps({"messages": messages, "model": "tiny", **fields}).encode()


def num_shared(first: tuple[bytes, ...], second: tuple[bytes, ...]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def test_the_next_turn_has_the_keys_of_the_one_before() -> None:
    turns = [text(5000), text(700, 1), text(300, 2), text(400, 3)]
    first, second = prefix_keys(chat(*turns[:2])), prefix_keys(chat(*turns))
    assert len(first) >= 10
    assert num_shared(first, second) >= len(first) - 1, "the last chunk holds what comes behind the conversation"
    other = prefix_keys(chat(turns[0], text(700, 9)))
    assert covered_bytes(num_shared(first, other)) in range(4000, 5100)


def test_what_stands_before_the_conversation_does_not_count() -> None:
    prompt = text(3000)
    bodies = [
        json.dumps({"model": "tiny", "max_tokens": n, "messages": [{"role": "user", "content": prompt}]}).encode()
        for n in (5, 500)
    ]
    first, second = map(prefix_keys, bodies)
    assert first == second != ()


@pytest.mark.parametrize("field", ["prompt", "input", "instructions"])
def test_every_way_to_give_a_prompt_has_keys(field: str) -> None:
    assert prefix_keys(json.dumps({"model": "tiny", field: text(2000)}).encode())


def test_salts_keep_conversations_apart() -> None:
    plain, one, other = (
        prefix_keys(chat(text(3000), **salt)) for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"})
    )
    assert num_shared(plain, one) == num_shared(one, other) == 0
    assert one[:4] == prefix_keys(chat(text(3000), "more", cache_salt="a"))[:4]


def test_short_and_strange_bodies_have_none() -> None:
    for body in (b"", b"{", b"[1, 2]", b"\xff" * 5000, chat("hello"), json.dumps({"model": "x" * 5000}).encode()):
        assert prefix_keys(body) == ()


def test_long_prompts_have_few_keys() -> None:
    assert len(prefix_keys(chat(text(2 * MAX_PREFIX_BYTES))[:MAX_PREFIX_BYTES])) < 100


class Choosing:
    """Requests through a `PrefixChoice`, answered when told."""

    def __init__(self, *names: str, max_excess: int = 4) -> None:
        self.choice = PrefixChoice(max_excess)
        self.choice.update(names)

    def send(self, body: bytes) -> str:
        keys = prefix_keys(body)
        name = self.choice.replica_of(keys)
        self.choice.began(name)
        self.choice.learn(name, keys)
        return name

    def ask(self, body: bytes) -> str:
        name = self.send(body)
        self.choice.ended(name)
        return name


def test_conversations_stay_and_are_shared_out() -> None:
    choosing = Choosing("a", "b")
    conversations = [[text(4000, seed), "question"] for seed in range(8)]
    at = [choosing.ask(chat(*turns)) for turns in conversations]
    assert Counter(at) == {"a": 4, "b": 4}
    for turn in range(5):
        for turns in conversations:
            turns += [text(100, turn), text(100, 100 + turn)]
        assert [choosing.ask(chat(*turns)) for turns in conversations] == at


def test_one_prefix_for_all_does_not_bury_a_replica() -> None:
    choosing = Choosing("a", "b", "c")
    at = Counter(choosing.send(chat(text(8000), str(number))) for number in range(30))
    assert min(at.values()) >= 6


def test_a_busy_replica_is_left_for_the_least_busy_one() -> None:
    choosing = Choosing("a", "b", max_excess=2)
    home = choosing.ask(chat(text(4000), "hello"))
    for _ in range(3):
        assert choosing.send(chat(text(4000), "hello")) == home
    assert choosing.send(chat(text(4000), "hello")) != home
    for _ in range(3):
        choosing.choice.ended(home)
    assert choosing.ask(chat(text(4000), "hello", "answer", "more")) == home, "both have it: fewer requests count"


def test_a_small_part_in_a_cache_does_not_count() -> None:
    choosing = Choosing("a", "b")
    at = Counter(choosing.ask(chat(text(1000), text(8000, seed))) for seed in range(10))
    assert at == {"a": 5, "b": 5}


def test_what_a_dead_replica_had_goes_on_at_the_others() -> None:
    choosing = Choosing("a", "b")
    conversations = [chat(text(4000, seed), "question") for seed in range(6)]
    at = [choosing.ask(body) for body in conversations]
    choosing.choice.update(["b", "c"])
    again = [choosing.ask(body) for body in conversations]
    assert set(again) == {"b", "c"}
    assert all(now == "b" for before, now in zip(at, again, strict=True) if before == "b")
    assert [choosing.ask(body) for body in conversations] == again
    for call in (choosing.choice.began, choosing.choice.ended, lambda name: choosing.choice.learn(name, [b"x"])):
        call("a")  # what is told late of a replica that is gone


def test_what_is_remembered_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_router, "MAX_KEYS", 40)
    choosing = Choosing("a", "b")
    for seed in range(50):
        choosing.ask(chat(text(4000, seed), "question"))
    assert all(len(replica) <= 40 for replica in choosing.choice._replicas.values())
    newest = choosing.ask(chat(text(4000, 49), "question"))
    assert choosing.choice._replicas[newest].num_known(prefix_keys(chat(text(4000, 49), "question"))) > 0


class Proxy:
    """What stands behind the middleware, and what it got."""

    def __init__(self) -> None:
        self.scope: Scope = {}
        self.received: list[Message] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        while not self.received or self.received[-1]["type"] != "http.disconnect":
            self.received.append(await receive())

    def ask(self, *messages: Message, path: str = CHAT, method: str = "POST") -> Any:
        """Return the keys in the scope; None without."""
        left = [*messages, {"type": "http.disconnect"}]

        async def receive() -> Message:
            return left.pop(0)

        async def send(message: Message) -> None:
            raise AssertionError

        asyncio.run(PrefixKeys(self)({"type": "http", "method": method, "path": path}, receive, send))
        assert self.received == [*messages, {"type": "http.disconnect"}], "the replica sees what the client sent"
        return self.scope.get(SCOPE_KEY)


def piece(body: bytes, *, more: bool = False) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


@pytest.fixture
def router() -> Any:
    class Router:
        pass

    router = Router()
    want_keys(router, wanted=True)
    yield router
    want_keys(router, wanted=False)


def test_the_middleware_names_prompts_and_changes_nothing(router: object) -> None:
    body = chat(text(6000))
    assert Proxy().ask(piece(body)) == prefix_keys(body)
    assert Proxy().ask(piece(body[:1000], more=True), piece(body[1000:], more=True), piece(b"")) == prefix_keys(body)
    assert Proxy().ask(piece(body), path="/second/v1/responses") == prefix_keys(body)
    with_system = b'{"max_tokens": 5, "system": "You help.", ' + body[1:]
    keys = Proxy().ask(piece(with_system), path="/v1/messages")
    assert keys == prefix_keys(with_system[with_system.index(b'"system"') :]), "the system's message is part of it"
    assert Proxy().ask(piece(body[:3000], more=True)) == prefix_keys(body[:3000]), "the client left"
    assert Proxy().ask() == ()


def test_the_middleware_stops_reading_in_time(router: object) -> None:
    half = b" " * (MAX_PREFIX_BYTES // 2)
    body = chat(text(6000))
    assert Proxy().ask(piece(body, more=True), *[piece(half, more=True)] * 4, piece(b"")) == prefix_keys(
        (body + half + half)[:MAX_PREFIX_BYTES]
    )


def test_the_middleware_leaves_other_requests_alone(router: object) -> None:
    assert Proxy().ask(piece(chat(text(6000))), path="/v1/models") is None
    assert Proxy().ask(method="GET") is None


def test_without_a_choice_nothing_is_read() -> None:
    assert Proxy().ask(piece(chat(text(6000)))) is None


def test_a_session_is_what_belongs_together_where_bodies_are_not_read() -> None:
    def keys(scope: dict[str, Any], session_id: str = "", *, is_http_request: bool = True) -> tuple[bytes, ...]:
        argument = pickle.dumps(StreamingHTTPRequest(asgi_scope=scope, proxy_actor_name="proxy"))
        metadata = SimpleNamespace(is_http_request=is_http_request, session_id=session_id)
        return prefix_router._keys(SimpleNamespace(metadata=metadata, args=[argument]))  # type: ignore[arg-type]

    assert keys({SCOPE_KEY: (b"1", b"2")}) == (b"1", b"2")
    assert keys({SCOPE_KEY: (b"1", b"2")}, "mine") == (b"1", b"2")
    assert keys({}, "mine") == (b"mine",)
    assert keys({}) == prefix_router._keys(None) == ()
    assert keys({SCOPE_KEY: (b"1",)}, is_http_request=False) == ()

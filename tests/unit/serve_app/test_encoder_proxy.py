"""Which engine's encoders are asked, when some have died."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
import ray

from raypp.errors import EncoderDiedError
from raypp.prompt_items import EncoderItem
from serve_app.replica import EncoderProxy


class Method:
    """What `actor.method` is: something to call with `.remote`."""

    def __init__(self, function: Callable) -> None:
        self._function = function

    async def remote(self, *args: object) -> object:
        return self._function(*args)


class Encoder:
    """An actor whose embeddings are all its number."""

    def __init__(self, number: int) -> None:
        self.number, self.is_dead = number, False
        self.process, self.encode = Method(self._process), Method(self._encode)

    def _process(self) -> None:
        if self.is_dead:
            raise ray.exceptions.RayActorError

    def _encode(self, items: list[EncoderItem]) -> dict[bytes, object]:
        self._process()
        return {item.key: np.full((1, item.num_tokens, 2), self.number, np.float32) for item in items}


def item(value: int) -> EncoderItem:
    return EncoderItem.of(np.full((4, 8), value, np.uint8), (1, 2, 2), 1)


def by_whom(proxy: EncoderProxy, engine: str | None = None) -> float:
    [rows] = asyncio.run(proxy.encode([item(1)], engine))
    return float(rows[0, 0, 0])


def test_any_engine_means_one_that_lives():
    proxy, old, new = EncoderProxy(), Encoder(1), Encoder(2)
    asyncio.run(proxy.join("old", [old]))
    asyncio.run(proxy.join("new", [new]))
    assert by_whom(proxy) == 2, "the one that joined last"
    assert by_whom(proxy, "old") == 1
    new.is_dead = True
    assert by_whom(proxy) == 1
    with pytest.raises(EncoderDiedError, match="an encoder died"):
        by_whom(proxy, "new")
    new.is_dead = False
    assert by_whom(proxy) == 2, "it was started again"


def test_who_joins_finds_dead_engines_forgotten():
    proxy, old, new = EncoderProxy(), Encoder(1), Encoder(2)
    asyncio.run(proxy.join("old", [old, Encoder(3)]))
    old.is_dead = True  # one of two
    asyncio.run(proxy.join("new", [new]))
    assert asyncio.run(proxy.health()) == {"old": [False, True], "new": [True]}
    new.is_dead = True
    asyncio.run(proxy.join("newest", [Encoder(4)]))
    assert asyncio.run(proxy.health()) == {"old": [False, True], "newest": [True]}
    with pytest.raises(EncoderDiedError, match="no engine with encoders is known") as caught:
        by_whom(proxy, "new")
    assert caught.value.expected == ["newest", "old"]

"""Names the beginnings of a prompt, in Ray Serve's proxy, for the router that runs there, too (`prefix_router.py`).

A router sees a request's headers and not its body, which the replica fetches later. So this middleware around the
proxy reads the body first, puts the names into the request's scope, and hands the body on as it came.

The body is not parsed: what counts is where the conversation begins in it. The next turn of a conversation has the
same bytes from there on, and then more.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import deque
from hashlib import blake2b
from weakref import WeakSet

from starlette.types import ASGIApp, Message, Receive, Scope, Send

SCOPE_KEY = "raypp.prefix_keys"
"""Under which a request's scope has its keys."""

MAX_PREFIX_BYTES = 1 << 20
"""Of a conversation, that are named: what is behind them changes no choice."""

_LEAST_CHUNK_BYTES = 512
_CHUNK_SHARE = 16  # a chunk is at least this part of what is before it, so that long prompts have few
_KEY_BYTES = 8
_PATHS = ("/chat/completions", "/completions", "/responses", "/messages")
_BEGINNING = re.compile(rb'"(?:messages|prompt|input|instructions|system)"\s*:')
_SALT_NAME = b'"cache_salt"'
_SALT = re.compile(_SALT_NAME + rb'\s*:\s*"((?:[^"\\]|\\.)*)"')

_readers: WeakSet[object] = WeakSet()


def _chunk_ends() -> list[int]:
    ends = [0]
    while (end := ends[-1] + max(_LEAST_CHUNK_BYTES, ends[-1] // _CHUNK_SHARE)) <= MAX_PREFIX_BYTES:
        ends.append(end)
    return ends


_ENDS = _chunk_ends()


def covered_bytes(num_keys: int) -> int:
    """Return how long the beginning is that has as many keys."""
    return _ENDS[num_keys]


def want_keys(reader: object, *, wanted: bool) -> None:
    """Say whether a router of this process reads keys. They are only made while one does."""
    if wanted:
        _readers.add(reader)
    else:
        _readers.discard(reader)


def prefix_keys(body: bytes) -> tuple[bytes, ...]:
    """Return names of the beginnings of a body's conversation, the shortest first; none of a short one.

    Two conversations have the same first keys if they have the same first bytes, and the same `cache_salt`.

    Args:
        body: JSON, or its first `MAX_PREFIX_BYTES`.
    """
    beginning = _BEGINNING.search(body)
    if beginning is None:
        return ()
    text = memoryview(body)[beginning.start() :]
    hasher = blake2b(digest_size=_KEY_BYTES)
    if _SALT_NAME in body and (salt := _SALT.search(body)):  # to look for the name alone is ten times faster
        hasher.update(salt[1])
    keys = []
    for index in range(1, bisect_right(_ENDS, len(text))):
        hasher.update(text[_ENDS[index - 1] : _ENDS[index]])
        keys.append(hasher.digest())
    return tuple(keys)


class PrefixKeys:
    """Reads the body of requests that generate text, if a router wants to know how they begin."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, with its keys in its scope."""
        if not (
            len(_readers) and scope["type"] == "http" and scope["method"] == "POST" and scope["path"].endswith(_PATHS)
        ):
            await self._app(scope, receive, send)
            return
        read: deque[Message] = deque()
        num_bytes, is_complete = 0, False
        while not is_complete and num_bytes < MAX_PREFIX_BYTES:
            message = await receive()
            read.append(message)
            num_bytes += len(message.get("body", b""))
            is_complete = not message.get("more_body", False)  # a client that left sends no more, either
        scope[SCOPE_KEY] = prefix_keys(b"".join(message.get("body", b"") for message in read)[:MAX_PREFIX_BYTES])

        async def replayed() -> Message:
            return read.popleft() if read else await receive()

        await self._app(scope, replayed, send)

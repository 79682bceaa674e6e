"""Makes Ray's waits for its gcs_server interruptible while both start.

Ray (2.60.0) waits in its library. For the port, it holds the interpreter for up to 30 s: who looks after the servers
learns only then that one has died, and the user's threads stand still. For what the gcs_server knows, it waits without
a limit, and ends the whole process after 60 s without one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from ray._private import node
from ray.exceptions import RpcError
from ray.experimental import internal_kv

_PORT, _GET = "wait_for_persisted_port", "_internal_kv_get"
_POLL_S = 0.05
_ANSWER_S = 1
_PORT_S, _GET_S = 30.0, 30.0  # of one that is alive; Ray's own, and half of what it gives itself


class _UnwantedError(BaseException):
    """Ends Ray's start. No Exception: after one Ray says that there is no dashboard, and goes on."""


@contextmanager
def gcs_waits_can_end(is_wanted: Callable[[], bool]) -> Iterator[None]:
    """Have Ray's start wait in Python while this is entered. Not for several at once.

    Args:
        is_wanted: Whether the start is still wanted; once it is not, it ends with a BaseException.
    """
    look: Callable[..., int] | None = getattr(node, _PORT, None)

    def wait_for_port(*place: Any, timeout_ms: float = _PORT_S * 1000, **others: Any) -> int:
        assert look is not None  # else nobody asks
        ends_s = time.monotonic() + timeout_ms / 1000
        while True:
            _check(is_wanted)
            try:
                return look(*place, timeout_ms=0, **others)
            except RuntimeError:  # the file with it is not there yet
                if time.monotonic() >= ends_s:
                    raise
            time.sleep(_POLL_S)

    def get(key: str | bytes, *, namespace: str | bytes | None = None) -> bytes | None:
        ends_s = time.monotonic() + _GET_S
        while True:
            _check(is_wanted)
            try:
                client: Any = internal_kv.global_gcs_client
                value: bytes | None = client.internal_kv_get(_bytes(key), _bytes(namespace), timeout=_ANSWER_S)
                return value
            except RpcError:
                if time.monotonic() >= ends_s:
                    raise
            time.sleep(_POLL_S)

    with _replaced(node, _PORT, wait_for_port), _replaced(internal_kv, _GET, get):
        yield


@contextmanager
def _replaced(module: ModuleType, name: str, function: Callable[..., object]) -> Iterator[None]:
    """Replace a function of a module meanwhile, if it has one of that name: not every version of Ray has each."""
    if (original := getattr(module, name, None)) is None:
        yield
        return
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, original)


def _check(is_wanted: Callable[[], bool]) -> None:
    if not is_wanted():
        raise _UnwantedError("nobody wants this start of Ray any more")


def _bytes(text: str | bytes | None) -> bytes | None:
    return text.encode() if isinstance(text, str) else text

"""Sockets end with their owner, also one that nobody closed: an error leaves such behind."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import zmq


def close_when_forgotten(
    owner: object, sockets: Sequence[zmq.Socket[bytes]], context: zmq.Context[zmq.Socket[bytes]] | None
) -> weakref.finalize[..., object]:
    """Return what closes sockets, and then their context: when it is called, or when nobody holds the owner any more.

    What zmq's own objects do in the garbage of a cycle is to end the context first, which waits for ever for sockets
    that come next. Messages on their way get as long as the sockets linger.

    Args:
        owner: Whose sockets these are.
        sockets: All of them; a list may still grow.
        context: Theirs, if it is the owner's own.
    """
    finalizer = weakref.finalize(owner, _close, sockets, context)
    finalizer.atexit = False  # the process's end takes everything along
    return finalizer


def _close(sockets: Sequence[zmq.Socket[bytes]], context: zmq.Context[zmq.Socket[bytes]] | None) -> None:
    for socket in sockets:
        socket.close()
    if context is not None:
        context.term()

"""zmq sockets that close when their owner does, or when it is garbage-collected without having been closed."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import zmq


def close_with_owner(
    owner: object, sockets: Sequence[zmq.Socket[bytes]], context: zmq.Context[zmq.Socket[bytes]] | None
) -> weakref.finalize[..., object]:
    """Return a function that closes the sockets, then their context. It also runs when the owner is garbage-collected.

    An error can leave an owner unclosed in a reference cycle. zmq's own finalizers may then end the context first, and
    wait forever for sockets that come next. Messages on their way get as long as the sockets linger.

    Args:
        owner: Whose sockets these are.
        sockets: All of them; a list may still grow.
        context: Theirs, if it is the owner's own.
    """
    finalizer = weakref.finalize(owner, _close, sockets, context)
    finalizer.atexit = False  # a process that ends closes its sockets anyway
    return finalizer


def _close(sockets: Sequence[zmq.Socket[bytes]], context: zmq.Context[zmq.Socket[bytes]] | None) -> None:
    for socket in sockets:
        socket.close()
    if context is not None:
        context.term()

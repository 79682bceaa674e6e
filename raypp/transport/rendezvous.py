"""A small key-value store on the first stage, where the stages of a pipeline meet before they have links.

The store is needed until all links are open. It is torch's, imported only where it is hosted or used: the driver
passes the address on without loading torch.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from raypp.errors import DeadlineError, ResourceError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore


@dataclass(frozen=True)
class Rendezvous:
    """The store's address."""

    host: str
    port: int


class RendezvousServer:
    """Hosts the store on a free port of one interface.

    Args:
        host: An address of this node that all stages can reach; loopback when all are on one node.

    Raises:
        ResourceError: this node has no such address.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        from torch._C._distributed_c10d import TCPStore  # torch.distributed has it without types

        # TCPStore's own socket would listen on every interface.
        try:
            listener = socket.create_server((host, 0), backlog=128)
        except OSError as error:
            raise ResourceError("cannot listen for the other stages", got=f"{host}: {error}") from error
        self.address = Rendezvous(host, listener.getsockname()[1])
        self._store: TCPStore | None = TCPStore(
            host, self.address.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    def close(self) -> None:
        """Stop serving. Call it once `open_stage_links` has returned on the first stage."""
        self._store = None


class Meeting:
    """One stage's connection to the store.

    Args:
        rendezvous: The store's address.
        timeout_s: How long the stages may take to meet, counted from now.
        prefix: Of keys, for those who meet apart from others.

    Raises:
        DeadlineError: nothing listens there.
    """

    def __init__(self, rendezvous: Rendezvous, timeout_s: float, prefix: str = "") -> None:
        from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

        self.rendezvous = rendezvous
        self._ends = time.monotonic() + timeout_s
        try:
            whole = TCPStore(
                rendezvous.host,
                rendezvous.port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout_s),
            )
        except RuntimeError as error:
            raise DeadlineError(
                "the first stage's rendezvous cannot be reached", got=str(error), expected=rendezvous
            ) from error
        self.store: Store = PrefixStore(prefix, whole) if prefix else whole

    @property
    def remaining_s(self) -> float:
        """Seconds left to meet, at least a millisecond."""
        return max(self._ends - time.monotonic(), 0.001)

    def tell(self, key: str, value: str) -> None:
        """Publish a value."""
        self.store.set(key, value)

    def ask(self, key: str, stage_index: int) -> str:
        """Return the value that stage `stage_index` publishes under `key`; waits for it.

        Raises:
            DeadlineError: it did not come in time.
        """
        self.await_all([(key, stage_index)])
        return self.store.get(key).decode()

    def await_all(self, keys: Iterable[tuple[str, int]]) -> None:
        """Wait until every key is there; a key comes with the stage that publishes it.

        Raises:
            DeadlineError: one did not come in time.
        """
        for key, stage_index in keys:
            try:
                self.store.wait([key], timedelta(seconds=self.remaining_s))
            except RuntimeError as error:
                raise DeadlineError(
                    f"stage {stage_index} did not come to the rendezvous", got=f"no {key!r}: {error}"
                ) from error

"""A barrier among neighbours on one node: nobody frees shared memory before its neighbours have unmapped it.

Each stage unmaps its neighbours' memory, tells them so, waits until they have told the same, and frees its own. A stage
that was killed needs to tell nothing: its socket ends with it. Sockets are in Linux's abstract namespace, so no file is
left over; but other users of the machine see the names, and may connect. So both ends look whose process the other is.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from collections.abc import Mapping

from raypp.errors import DeadlineError

_STAGE_INDEX = struct.Struct("<i")
_CREDENTIALS = struct.Struct("3i")  # pid, user, group: `ucred` of Linux


class UnmapBarrier:
    """One stage's sockets to its neighbours, one each.

    Args:
        stage_index: Of this stage.
    """

    def __init__(self, stage_index: int) -> None:
        self._stage_index = stage_index
        self._sockets: dict[int, socket.socket] = {}
        self.address = f"raypp-{secrets.token_hex(16)}"
        """Where neighbours of a higher index connect to."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{self.address}")
        self._listener.listen(64)

    def connect(self, addresses: Mapping[int, str], timeout_s: float) -> None:
        """Connect to all neighbours.

        Args:
            addresses: Of the neighbours, by stage index.
            timeout_s: How long they may take to come.

        Raises:
            DeadlineError: one did not come, or cannot be reached.
        """
        ends = time.monotonic() + timeout_s
        for peer, address in addresses.items():
            if peer < self._stage_index:
                self._sockets[peer] = self._connect_to(peer, address, timeout_s)
        awaited = {peer for peer in addresses if peer > self._stage_index}
        while awaited:
            self._listener.settimeout(max(ends - time.monotonic(), 0.001))
            try:
                connection, _ = self._listener.accept()
                connection.settimeout(max(ends - time.monotonic(), 0.001))
                received = b""
                if _user_of(connection) == os.geteuid():
                    received = connection.recv(_STAGE_INDEX.size, socket.MSG_WAITALL)
            except OSError as error:
                raise DeadlineError(
                    f"stage {min(awaited)} did not connect", got=str(error), expected=f"a connection in {timeout_s} s"
                ) from error
            newcomer = _STAGE_INDEX.unpack(received)[0] if len(received) == _STAGE_INDEX.size else None
            if newcomer in awaited:
                awaited.remove(newcomer)
                self._sockets[newcomer] = connection
            else:
                connection.close()
        self._listener.close()

    def arrive(self) -> None:
        """Tell all neighbours that this stage has unmapped their memory."""
        for connection in self._sockets.values():
            try:
                connection.shutdown(socket.SHUT_WR)
            except OSError:
                continue  # it is gone

    def wait(self, timeout_s: float) -> list[int]:
        """Wait until all neighbours have arrived or are gone; return the stages that took longer than `timeout_s`."""
        ends = time.monotonic() + timeout_s
        missing = []
        for peer, connection in self._sockets.items():
            connection.settimeout(max(ends - time.monotonic(), 0.001))
            try:
                connection.recv(1)
            except TimeoutError:
                missing.append(peer)
            except OSError:
                continue  # it is gone
        return missing

    def close(self) -> None:
        """Close the sockets."""
        for connection in [self._listener, *self._sockets.values()]:
            connection.close()

    def _connect_to(self, peer: int, address: str, timeout_s: float) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout_s)
        try:
            connection.connect(f"\0{address}")
            if (user := _user_of(connection)) != os.geteuid():
                raise PermissionError(f"its socket is of user {user}, this process of user {os.geteuid()}")
            connection.sendall(_STAGE_INDEX.pack(self._stage_index))
        except OSError as error:
            connection.close()
            raise DeadlineError(
                f"stage {peer} cannot be reached",
                got=str(error),
                hint="ipc links need stages in one network namespace of one node; transport=nccl does not",
            ) from error
        return connection


def _user_of(connection: socket.socket) -> int:
    """Return the id of the user whose process is at the other end."""
    _, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)

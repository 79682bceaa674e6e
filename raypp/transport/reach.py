"""Whether a process reaches an address over TCP: said within seconds, by name, and with what to open.

gloo, NCCL and ZeroMQ wait for a connection as long as the engine may take to start, and do not say to what.
"""

from __future__ import annotations

import socket
from pathlib import Path

from raypp.errors import ResourceError

_REACH_S, _LEAST_S = 10.0, 1.0
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def check_reach(who: str, whom: str, address: str, timeout_s: float = _REACH_S) -> None:
    """Connect, and hang up.

    Args:
        who: This process, for the error.
        whom: Who listens there, for the error.
        address: host:port; `tcp://host:port` of ZeroMQ, too.
        timeout_s: For the connection, 10 s at most.

    Raises:
        ResourceError: there is no connection.
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    timeout_s = min(max(timeout_s, _LEAST_S), _REACH_S)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
    except OSError as error:
        raise ResourceError(
            f"{who} cannot reach {whom}",
            got=f"{host}:{port} from {socket.gethostname()}: {error}",
            expected=f"a TCP connection within {timeout_s:g} s",
            hint=f"open TCP ports {port_range()} between the engine's nodes, both ways "
            "(net.ipv4.ip_local_port_range on each), beside Ray's own",
        ) from error


def port_range() -> str:
    """Return the ports that Linux gives out on this node where none is asked for: links between stages use them."""
    try:
        return "-".join(_PORT_RANGE.read_text().split())
    except OSError:
        return "above 1023"

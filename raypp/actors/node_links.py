"""Measures what joins the nodes of a cluster: round trip and rate of one TCP connection, and versions that differ.

On each node an actor listens on a port like those of links between stages, and a task on every other node connects.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypp.actors.cluster import Cluster
from raypp.actors.deadline import raypp_errors
from raypp.actors.node_share import differences, versions_here
from raypp.actors.placement import Node, alive_nodes
from raypp.errors import RayppError
from raypp.transport.reach import check_reach

_ROUND_TRIPS, _SENDING_S, _PIECE_BYTES = 50, 0.5, 1 << 20
_PING = b"p"
_WAIT_S = 30.0  # for an answer over TCP
_START_S = 120.0  # for Ray to start a process on a node


@dataclass(frozen=True)
class NodeLink:
    """What a connection from one node to another was measured to be.

    Attributes:
        sender: Address of the node that connects.
        receiver: Address of the node that listens.
        round_trip_s: Of one byte, the median, seconds.
        bytes_per_s: That one connection carries.
    """

    sender: str
    receiver: str
    round_trip_s: float
    bytes_per_s: float


def measure_nodes() -> tuple[dict[str, str], list[NodeLink | str]]:
    """Connect to the cluster of RAY_ADDRESS, measure between all its nodes, and leave.

    Returns:
        By a node's address what differs from this one, empty if nothing; what joins each node to each other, or why
        nothing does.

    Raises:
        ResourceError, DeadlineError, EngineDeadError: the cluster cannot be asked, or a node does not answer.
    """
    assert os.environ.get("RAY_ADDRESS"), "without it a Ray would be started"
    cluster = Cluster.connect()
    try:
        nodes = alive_nodes()
        with raypp_errors(f"{_START_S:g} s"):
            listen: Any = ray.remote(_Listener)  # Ray's types know neither
            measure: Any = ray.remote(_measure)
            listeners = [listen.options(**_on(node)).remote(node.host) for node in nodes]
            found = ray.get([listener.versions.remote() for listener in listeners], timeout=_START_S)
            ports = ray.get([listener.port.remote() for listener in listeners], timeout=_WAIT_S)
            links: list[NodeLink | str] = []
            for sender in nodes:
                for receiver, port in zip(nodes, ports, strict=True):
                    if sender is not receiver:  # one after the other: they would share the network
                        task = measure.options(max_retries=0, **_on(sender)).remote(sender.host, receiver.host, port)
                        links.append(ray.get(task, timeout=_START_S))
        own = versions_here()
        return {node.host: differences(own, there, node.host) for node, there in zip(nodes, found, strict=True)}, links
    finally:
        cluster.disconnect()


def _on(node: Node) -> dict[str, Any]:
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node.node_id, soft=False)}


class _Listener:
    """Answers each byte, and at a connection's end says how many came."""

    def __init__(self, host: str) -> None:
        self._server = socket.create_server((host, 0))
        threading.Thread(target=self._serve, name="listener", daemon=True).start()

    def versions(self) -> dict[str, str]:
        return versions_here()

    def port(self) -> int:
        return int(self._server.getsockname()[1])

    def _serve(self) -> None:
        while True:
            connection, _ = self._server.accept()
            with connection, suppress(OSError):  # a sender that is gone ends its own measurement
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while (piece := connection.recv(_PIECE_BYTES)) == _PING:
                    connection.sendall(piece)
                while piece:
                    piece = connection.recv(_PIECE_BYTES)
                connection.sendall(_PING)


def _measure(sender: str, receiver: str, port: int) -> NodeLink | str:
    """Return what joins this node to a listener; an error as text."""
    try:
        check_reach(sender, receiver, f"{receiver}:{port}")
        with socket.create_connection((receiver, port), _WAIT_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            trips = []
            for _ in range(_ROUND_TRIPS):
                begun_s = time.perf_counter()
                connection.sendall(_PING)
                connection.recv(1)
                trips.append(time.perf_counter() - begun_s)
            piece, num_bytes, begun_s = bytes(_PIECE_BYTES), 0, time.perf_counter()
            while time.perf_counter() < begun_s + _SENDING_S:
                connection.sendall(piece)
                num_bytes += len(piece)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)  # all has arrived
            took_s = time.perf_counter() - begun_s
    except (OSError, RayppError) as error:
        return str(error)
    return NodeLink(sender, receiver, sorted(trips)[len(trips) // 2], num_bytes / took_s)

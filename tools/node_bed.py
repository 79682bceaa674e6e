"""Several nodes on one host, joined by a wire with a rate and a delay, and a Ray cluster on them.

    .venv/bin/python tools/node_bed.py --rate 10 --delay 0.5 -- raypp doctor --cluster

A node is a set of Linux namespaces: its own network, processes, mounts and /dev/shm, where Ray and programs keep all
their files. All of it goes when the node's first process ends, and that one ends when its input is closed: with the
process that made the bed, however that ends.

The wire is a thread that carries IP packets between a TUN device in each node. It does what `tc netem` does, on kernels
without netem, too: a packet leaves after those before it, at the wire's rate, and arrives one delay later. It also
stands for a firewall. In Python it carries about 5 Gb/s per processor core that it has for itself. What sends more, as
GPUs do, can take a cable beside it: a veth pair between the first two nodes, with a rate and no delay.

Needs Linux, root (CAP_SYS_ADMIN, CAP_NET_ADMIN), /dev/net/tun, iproute2, and `unshare` and `nsenter` of util-linux.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import os
import queue
import secrets
import select
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NUM_CPUS = 2
"""That each node tells Ray."""
_NAMESPACES = ("--net", "--pid", "--mount", "--ipc")
_INIT = "mount -t tmpfs -o size=1g tmpfs /dev/shm && mkdir /dev/shm/tmp && echo ready && read _"
_STORE_BYTES = 80 << 20
_GCS_PORT = 6379
RAY_PORTS = {
    "node-manager-port": 6380,
    "object-manager-port": 6381,
    "runtime-env-agent-port": 6382,
    "dashboard-agent-grpc-port": 6383,
    "dashboard-agent-listen-port": 6384,
    "metrics-export-port": 6385,
}
WORKER_PORTS = range(10_002, 10_100)
"""Of Ray's processes on a node; with `RAY_PORTS` and the head's 6379 all that Ray itself needs open."""
OPEN_TO_RAY = frozenset({_GCS_PORT, *RAY_PORTS.values(), *WORKER_PORTS})
_SETTINGS = {  # a lost node is noticed within seconds; processes may take long to start on a busy machine
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "4",
    "RAY_agent_register_timeout_ms": "600000",
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_worker_niceness": "0",
    "TMPDIR": "/dev/shm/tmp",
    "RAY_TMPDIR": "/dev/shm/tmp",
}
_SAYING: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
_START_S, _ANSWER_S, _END_S = 120.0, 20.0, 20.0
_CLONE_NEWNET, _TUNSETIFF, _TUNSETOFFLOAD = 0x40000000, 0x400454CA, 0x400454D0
_TUN_FLAGS, _OFFLOADS = 0x0001 | 0x1000 | 0x4000, 1 | 2 | 4  # IP packets behind a virtio header; checksums, segments
_VIRTIO_BYTES, _LARGEST_BYTES, _AT_ONCE = 10, 70_000, 16
_TCP, _SYN, _SYN_AND_ACK = 6, 0x02, 0x12


class BedError(RuntimeError):
    """The bed cannot be made, or something on it did not come in time."""


def obstacle() -> str | None:
    """Return why this machine can hold no bed, and what it needs; None: it can."""
    if not sys.platform.startswith("linux"):
        return f"{sys.platform} has no network namespaces; run on Linux"
    if lacking := [name for name in ("unshare", "nsenter", "ip", "bash") if shutil.which(name) is None]:
        return f"{', '.join(lacking)} not found; install util-linux, iproute2 and bash"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "no right to /dev/net/tun; run as root, in a container with --device /dev/net/tun"
    tried = subprocess.run(
        ["unshare", *_NAMESPACES, "--fork", "--mount-proc", "ip", "tuntap", "add", "try", "mode", "tun"],
        capture_output=True,
        text=True,
        timeout=_ANSWER_S,
    )
    if tried.returncode:
        said = tried.stderr.strip() or f"exit code {tried.returncode}"
        return f"no right to namespaces or TUN devices ({said}); run as root, in a container with --privileged"
    return None


@dataclass(eq=False)
class _Port:
    """A node's end of the wire."""

    device: int  # file descriptor
    is_free_at: float = 0.0
    on_the_way: deque[tuple[float, bytes]] = field(default_factory=deque)  # to this node, by when each arrives


class Wire:
    """Carries packets between nodes.

    Attributes:
        gbits: The rate into each node, Gb/s; 0: as fast as it can.
        delay_ms: One way.
        open_ports: To which others may connect, by a node's address; all ports of nodes that are not named.
        num_bytes: That were carried, headers included.
    """

    def __init__(self, gbits: float, delay_ms: float) -> None:
        self.gbits, self.delay_ms = gbits, delay_ms
        self.open_ports: dict[str, Collection[int]] = {}
        self.num_bytes = 0
        self._ports: dict[bytes, _Port] = {}  # by the node's address
        self._wishes: queue.SimpleQueue[tuple[Callable[[], None], Future[None]]] = queue.SimpleQueue()
        self._woken, self._wake = os.pipe()
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="wire", daemon=True)
        self._thread.start()

    def plug(self, address: str, pid: int) -> None:
        """Give the network namespace of a process a device with this address, and join it to the wire."""
        self._have_done(lambda: self._plug(address, pid))

    def unplug(self, address: str) -> None:
        """Take a node off the wire, as when its cable is pulled."""
        self._have_done(lambda: self._unplug(_packed(address)))

    def close(self) -> None:
        """End the thread, and all devices."""
        if not self._is_ending:
            self._have_done(self._end)
            self._thread.join(_ANSWER_S)
            os.close(self._woken)
            os.close(self._wake)

    def _have_done(self, function: Callable[[], None]) -> None:
        done: Future[None] = Future()
        self._wishes.put((function, done))
        os.write(self._wake, b"x")
        done.result(_ANSWER_S)

    def _run(self) -> None:
        while not self._is_ending:
            due = min((port.on_the_way[0][0] for port in self._ports.values() if port.on_the_way), default=None)
            timeout_s = None if due is None else max(due - time.monotonic(), 0.0)
            readable, _, _ = select.select([self._woken, *(p.device for p in self._ports.values())], [], [], timeout_s)
            self._deliver()
            for device in readable:
                if device != self._woken and any(port.device == device for port in self._ports.values()):
                    self._take_from(device)
            self._deliver()
            if self._woken in readable:
                os.read(self._woken, 1)
                function, done = self._wishes.get()
                try:
                    function()
                    done.set_result(None)
                except Exception as error:
                    done.set_exception(error)

    def _take_from(self, device: int) -> None:
        for _ in range(_AT_ONCE):
            try:
                frame = os.read(device, _LARGEST_BYTES)
            except OSError as error:
                if not isinstance(error, BlockingIOError):  # the namespace is gone
                    self._unplug(next(address for address, port in self._ports.items() if port.device == device))
                return
            port = self._ports.get(frame[_VIRTIO_BYTES + 16 : _VIRTIO_BYTES + 20])
            if port is None or frame[_VIRTIO_BYTES] >> 4 != 4 or not self._passes(frame[_VIRTIO_BYTES:]):
                continue
            size = len(frame) - _VIRTIO_BYTES
            self.num_bytes += size
            port.is_free_at = max(port.is_free_at, time.monotonic()) + (size * 8e-9 / self.gbits if self.gbits else 0)
            port.on_the_way.append((port.is_free_at + self.delay_ms / 1000, frame))

    def _passes(self, packet: bytes) -> bool:
        open_ports = self.open_ports.get(".".join(map(str, packet[16:20])))
        if open_ports is None or packet[9] != _TCP:
            return True
        tcp = packet[(packet[0] & 15) * 4 :]
        return tcp[13] & _SYN_AND_ACK != _SYN or int.from_bytes(tcp[2:4], "big") in open_ports

    def _deliver(self) -> None:
        for address, port in list(self._ports.items()):
            while port.on_the_way and port.on_the_way[0][0] <= time.monotonic():
                _, frame = port.on_the_way.popleft()
                try:
                    os.write(port.device, frame)
                except OSError:  # the namespace is gone
                    self._unplug(address)
                    break

    def _plug(self, address: str, pid: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        with ExitStack() as opened:
            own, other = (
                opened.enter_context(open(f"/proc/{name}/ns/net", "rb")) for name in ("thread-self", str(pid))
            )
            if libc.setns(other.fileno(), _CLONE_NEWNET):  # this thread's alone
                raise BedError(f"cannot enter the network namespace: {os.strerror(ctypes.get_errno())}")
            opened.callback(libc.setns, own.fileno(), _CLONE_NEWNET)
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)  # of this namespace
            self._ports[_packed(address)] = _Port(device)
            fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"wire", _TUN_FLAGS))
            fcntl.ioctl(device, _TUNSETOFFLOAD, _OFFLOADS)
            for command in (
                f"addr add {address}/24 dev wire",
                "link set wire mtu 9000 up",
                "link set lo up",
            ):
                subprocess.run(["ip", *command.split()], check=True, capture_output=True, timeout=_ANSWER_S)

    def _unplug(self, address: bytes) -> None:
        if (port := self._ports.pop(address, None)) is not None:
            os.close(port.device)

    def _end(self) -> None:
        for address in list(self._ports):
            self._unplug(address)
        self._is_ending = True


def _packed(address: str) -> bytes:
    return bytes(map(int, address.split(".")))


class NodeBed:
    """A Ray cluster of several nodes on one host; a context manager, whose end leaves nothing.

    Args:
        num_nodes: Of which the first is the head.
        gbits: The wire's rate into each node, Gb/s; 0: as fast as it can.
        delay_ms: The wire's, one way.
        environments: Variables of what runs on some nodes, by the node's index.
        has_cable: Whether a veth pair, the device `cable` on both, joins the first two nodes, too.

    Raises:
        BedError: this machine can hold none, or a node did not start.
    """

    def __init__(
        self,
        num_nodes: int = 2,
        *,
        gbits: float = 0.0,
        delay_ms: float = 0.0,
        environments: dict[int, dict[str, str]] | None = None,
        has_cable: bool = False,
    ) -> None:
        if (why_not := obstacle()) is not None:
            raise BedError(why_not)
        if has_cable and shutil.which("tc") is None:
            raise BedError("tc not found; a cable has its rate from it; install iproute2")
        self.wire = Wire(gbits, delay_ms)
        self._token = secrets.token_hex(32)
        self._environments = environments or {}
        self._nodes: dict[int, subprocess.Popen[str]] = {}
        self._programs: list[subprocess.Popen[Any]] = []
        self._cable_gbits = 0.0 if has_cable else None
        try:
            starts = [self._start_node(index) for index in range(num_nodes)]
            self._lay_cable()
            for index, start in enumerate(starts):
                self._await_ray(index, start)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> NodeBed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def ray_address(self) -> str:
        """The cluster's; programs on the bed find it in RAY_ADDRESS."""
        return f"{address_of(0)}:{_GCS_PORT}"

    def add_node(self, index: int) -> None:
        """Start a node; one that was killed comes back under the same address."""
        start = self._start_node(index)
        if index < 2:
            self._lay_cable()
        self._await_ray(index, start)

    def kill_node(self, index: int) -> None:
        """End a node at once, as when its power fails: nobody is told."""
        self.wire.unplug(address_of(index))
        self._end_node(index)

    def start(self, index: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a program on a node; it ends with the node, or with the bed.

        Args:
            index: Of the node.
            command: Program and arguments.
            options: Of `subprocess.Popen`; `env` is added to this process's variables and the bed's.
        """
        own = {"RAY_ADDRESS": self.ray_address, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self._token}
        environment = os.environ | _SETTINGS | own | self._environments.get(index, {}) | options.pop("env", {})
        target = ["nsenter", "--target", str(self.pid(index)), *_NAMESPACES, "--"]
        program = subprocess.Popen([*target, *command], env=environment, **options)
        self._programs.append(program)
        return program

    def _lay_cable(self) -> None:
        if self._cable_gbits is None or not {0, 1} <= self._nodes.keys():
            return
        for index in range(2):  # where a node was lost, the other may still have its end
            self.start(index, ["ip", "link", "delete", "cable"], stderr=subprocess.DEVNULL).wait(_ANSWER_S)
        ends = [str(self.pid(index)) for index in range(2)]
        pair = f"ip link add cable netns {ends[0]} type veth peer name cable netns {ends[1]}".split()
        _finish("no cable", subprocess.Popen(pair, **_SAYING), _ANSWER_S)
        for index in range(2):
            for command in (f"addr add 198.19.0.{index + 1}/24 dev cable", "link set cable mtu 9000 up"):
                _finish("no cable", self.start(index, ["ip", *command.split()], **_SAYING), _ANSWER_S)
        self.set_cable_rate(self._cable_gbits)

    def set_cable_rate(self, gbits: float) -> None:
        """Limit what the cable carries each way, but for a segment of 64 KB, which passes at once after a pause.

        Args:
            gbits: Gb/s; 0: as fast as the kernel.
        """
        limit = f"tbf rate {round(gbits * 1e6)}kbit burst 70kb latency 200ms" if gbits else "pfifo limit 1000"
        self._cable_gbits = gbits
        for index in range(2) if {0, 1} <= self._nodes.keys() else ():
            command = f"tc qdisc replace dev cable root {limit}".split()
            _finish("no cable", self.start(index, command, **_SAYING), _ANSWER_S)

    def pid(self, index: int) -> int:
        """Return the first process of a node, as this namespace counts."""
        [pid] = _children_of(self._nodes[index].pid)
        return pid

    def close(self) -> None:
        """End all nodes and what runs on them."""
        for index in list(self._nodes):
            self._end_node(index)
        self.wire.close()

    def _start_node(self, index: int) -> subprocess.Popen[Any]:
        node = subprocess.Popen(
            ["unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc", "bash", "-c", _INIT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._nodes[index] = node
        assert node.stdout is not None
        if not select.select([node.stdout], [], [], _START_S)[0] or node.stdout.readline() != "ready\n":
            raise BedError(f"node {index} did not start")
        self.wire.plug(address_of(index), self.pid(index))
        role = ["--head", f"--port={_GCS_PORT}", "--include-dashboard=false"] if index == 0 else []
        joins = [] if index == 0 else [f"--address={self.ray_address}"]
        command = [
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            *role,
            *joins,
            "--disable-usage-stats",
            "--include-log-monitor=false",
        ]
        command += [f"--node-ip-address={address_of(index)}", f"--num-cpus={NUM_CPUS}"]
        command += [f"--object-store-memory={_STORE_BYTES}"]
        command += [f"--{name}={port}" for name, port in RAY_PORTS.items()]
        command += [f"--min-worker-port={WORKER_PORTS.start}", f"--max-worker-port={WORKER_PORTS.stop - 1}"]
        return self.start(index, command, env={"RAY_ADDRESS": ""}, **_SAYING)

    def _await_ray(self, index: int, start: subprocess.Popen[Any]) -> None:
        _finish(f"no Ray on node {index}", start, _START_S)

    def _end_node(self, index: int) -> None:
        node = self._nodes.pop(index)
        first = [os.pidfd_open(pid) for pid in _children_of(node.pid)]  # none if it never started
        node.kill()  # its first process with it, and all others before that one's end
        node.wait(_END_S)
        ended = select.select(first, [], [], _END_S)[0]
        for descriptor in first:
            os.close(descriptor)
        if ended != first:
            raise BedError(f"node {index} did not end within {_END_S:g} s")
        for pipe in (node.stdin, node.stdout):
            assert pipe is not None
            pipe.close()
        for program in self._programs:
            if program.poll() is None and not self._nodes:
                program.wait(_END_S)


def _finish(failure: str, program: subprocess.Popen[Any], timeout_s: float) -> None:
    """Wait for a program to end well; it was started with `_SAYING`."""
    try:
        said, _ = program.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise BedError(f"{failure} within {timeout_s:g} s") from error
    if program.returncode:
        raise BedError(f"{failure}: {said[-2000:].strip()}")


def _children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def address_of(index: int) -> str:
    """Return a node's address on the wire."""
    return f"198.18.0.{index + 1}"


def main() -> int:
    """Run a command on the first node of a bed; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--rate", type=float, default=0.0, help="Gb/s; 0: as fast as it can")
    parser.add_argument("--delay", type=float, default=0.0, help="ms, one way")
    parser.add_argument("command", nargs="+", help="runs on the first node, with RAY_ADDRESS set")
    args = parser.parse_args()
    try:
        with NodeBed(args.nodes, gbits=args.rate, delay_ms=args.delay) as bed:
            return bed.start(0, args.command).wait()
    except BedError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

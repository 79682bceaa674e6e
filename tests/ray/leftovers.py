"""What an engine may not leave behind: processes, shared memory, listening ports, files in the temporary folder."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

TEST_RUN = "TEST_RUN_OF_RAY"
os.environ.setdefault(TEST_RUN, f"{os.getpid()}-{time.time_ns()}")


def is_alive(pid: int) -> bool:
    """Return whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids: Iterable[int], timeout_s: float) -> list[int]:
    """Return the processes that still run after `timeout_s`."""
    pids, ends = list(pids), time.monotonic() + timeout_s
    while (left := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < ends:
        time.sleep(0.02)
    return left


def shared_memory() -> set[str]:
    """Return the names in /dev/shm."""
    return set(os.listdir("/dev/shm"))


def listening_ports() -> set[int]:
    """Return the TCP ports that anyone listens on."""
    ports = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                ports.add(int(fields[1].rsplit(":", 1)[1], 16))
    return ports


def meeting_places(folder: Path) -> list[str]:
    """Return raypp's folders in a folder for temporary files."""
    return [path.name for path in folder.glob("raypp-*")]


def actor_processes() -> dict[int, str]:
    """Return the processes of raypp's actors and their classes, by the name that Ray gives them.

    Only of Rays that this test run started: they inherit its environment.
    """
    found = {}
    run = f"{TEST_RUN}={os.environ[TEST_RUN]}".encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            title = path.read_bytes()
            if not title.startswith(b"ray::") or run not in (path.parent / "environ").read_bytes().split(b"\0"):
                continue
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        for name in ("DriverActor", "StageActor", "EncoderActor"):
            if title.startswith(f"ray::{name}".encode()):
                found[int(path.parent.name)] = name
    return found


def raypp_processes() -> set[int]:
    """Return the processes of raypp's actors."""
    return set(actor_processes())

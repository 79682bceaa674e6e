"""What an engine may not leave behind: processes, shared memory, files in the temporary folder."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
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


def unused_shared_memory() -> set[str]:
    """Return the names in /dev/shm that no process has mapped: a test beside this one may use others."""
    mapped = set()
    for path in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            mapped |= {line.rpartition("/dev/shm/")[2] for line in path.read_text().splitlines() if "/dev/shm/" in line}
    return shared_memory() - mapped


def processes_with(variable: str, value: str) -> set[int]:
    """Return the processes that have inherited an environment variable; no port is listened on without one."""
    found, wanted = set(), f"{variable}={value}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if wanted in path.read_bytes().split(b"\0"):
                found.add(int(path.parent.name))
    return {pid for pid in found if is_alive(pid)}


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


def listening_ports(pid: int) -> set[int]:
    """Return the TCP ports on which a process listens."""
    sockets = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            sockets.add(os.readlink(path))
    lines = [line for name in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]]
    found, is_listening = set(), "0A"
    for line in lines:
        _, address, _, state, *_, inode = line.split()[:10]
        if state == is_listening and f"socket:[{inode}]" in sockets:
            found.add(int(address.rpartition(":")[2], 16))
    return found

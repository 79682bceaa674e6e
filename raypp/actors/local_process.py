"""Reads the state of this machine's processes from /proc. A zombie counts as ended."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_POLL_S = 0.01


@dataclass(frozen=True)
class LocalProcess:
    """A process, named so that another one that gets its number later is not taken for it."""

    pid: int
    start_time: int  # clock ticks from the machine's start to the process's; 0 when it had ended already

    @classmethod
    def of_pid(cls, pid: int) -> LocalProcess:
        """Return the process that has this number now."""
        entry = _read(pid)
        return cls(pid, 0 if entry is None or entry.is_zombie else entry.start_time)

    @classmethod
    def of_this_process(cls) -> LocalProcess:
        """Return the process that asks."""
        return cls.of_pid(os.getpid())

    def is_alive(self) -> bool:
        """Return whether it still runs."""
        return self.start_time != 0 and LocalProcess.of_pid(self.pid) == self

    def is_stopped(self) -> bool:
        """Return whether it was stopped by a signal, and hears nothing."""
        entry = _read(self.pid)
        return entry is not None and entry.process == self and entry.is_stopped

    def kill(self) -> None:
        """End it at once, if it still runs."""
        if self.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


@dataclass(frozen=True)
class Child:
    """A child of some process, alive or a zombie."""

    pid: int
    start_time: int
    name: str  # of its program, cut off after 15 characters
    is_zombie: bool
    parent_pid: int
    is_stopped: bool = False

    @property
    def process(self) -> LocalProcess:
        """The process; also of a zombie, which is not alive."""
        return LocalProcess(self.pid, self.start_time)

    def command(self) -> str:
        """Return its command line; empty of a zombie."""
        try:
            return Path(f"/proc/{self.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            return ""


def children_of(pid: int) -> list[Child]:
    """Return the processes whose parent this one is."""
    return [child for child in _all() if child.parent_pid == pid]


def with_descendants(processes: list[LocalProcess]) -> list[LocalProcess]:
    """Return processes and everything that descends from them, parents first."""
    children: dict[int, list[LocalProcess]] = {}
    for child in _all():
        children.setdefault(child.parent_pid, []).append(child.process)
    return list(dict.fromkeys(_below(processes, children)))


def await_end(processes: Iterable[LocalProcess], timeout_s: float) -> list[LocalProcess]:
    """Wait until processes have ended; return those that still run after `timeout_s`."""
    left, ends_s = list(processes), time.monotonic() + timeout_s
    while (left := [process for process in left if process.is_alive()]) and time.monotonic() < ends_s:
        time.sleep(_POLL_S)
    return left


def _below(processes: list[LocalProcess], children: Mapping[int, list[LocalProcess]]) -> Iterator[LocalProcess]:
    for process in processes:
        yield process
        yield from _below(children.get(process.pid, []), children)


def _all() -> Iterator[Child]:
    for folder in Path("/proc").glob("[0-9]*"):
        if (child := _read(int(folder.name))) is not None:
            yield child


def _read(pid: int) -> Child | None:
    """Return what the process table says of a process; None when it is not there."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    name, _, rest = stat.partition("(")[2].rpartition(")")
    fields = rest.split()
    return Child(pid, int(fields[19]), name, fields[0] in "ZX", int(fields[1]), is_stopped=fields[0] in "Tt")

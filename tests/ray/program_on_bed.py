"""What tests of nodes do with a bed: a program with an engine on the first node, and what runs on which node."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from node_bed import NodeBed

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parent / "node_program.py"
WAIT_S = 150.0


class Program:
    """`node_program.py` on the first node."""

    def __init__(self, bed: NodeBed, **variables: str) -> None:
        self._process = bed.start(
            0,
            [sys.executable, str(PROGRAM)],
            env={"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}".rstrip(":"), **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, do: str, **task: Any) -> None:
        """Give a task."""
        self._process.stdin.write(json.dumps({"do": do, **task}) + "\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """Return the answer to the oldest task."""
        assert select.select([self._process.stdout], [], [], WAIT_S)[0], "no answer"
        line = self._process.stdout.readline()
        assert line, f"the program ended: {self._process.wait(WAIT_S)}"
        return json.loads(line)

    def ask(self, do: str, **task: Any) -> dict[str, Any]:
        """Give a task, and return its answer."""
        self.tell(do, **task)
        return self.hear()

    def end(self) -> None:
        """Have it close its engine and end."""
        self._process.stdin.close()
        assert self._process.wait(WAIT_S) == 0
        self._process.stdout.close()


def processes_of(namespace: str) -> dict[int, str]:
    """Return the command lines of the processes in a process namespace, by id; Ray's actors are named in theirs."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            if os.readlink(path / "ns/pid") == namespace:
                found[int(path.name)] = (path / "cmdline").read_text().replace("\0", " ")[:200]
    return {pid: line for pid, line in found.items() if line}  # what has ended has none


def namespace(bed: NodeBed, index: int) -> str:
    """Return the process namespace of a node."""
    return os.readlink(f"/proc/{bed.pid(index)}/ns/pid")


def pids_of(bed: NodeBed, index: int, name: str) -> list[int]:
    """Return the processes on a node whose command line has a name."""
    return [pid for pid, line in processes_of(namespace(bed, index)).items() if name in line]


def stages_on(bed: NodeBed, index: int) -> set[str]:
    """Return the names of stages on a node: `0`; of members of one: `0_1`."""
    lines = " ".join(processes_of(namespace(bed, index)).values())
    return set(re.findall(r"ray::StageActor([0-9_]+)", lines))


def start_requests(program: Program, **task: Any) -> None:
    """Let requests run, and return when they have some tokens."""
    before = program.ask("look")["stats"]["num_generated_tokens"]
    program.tell("submit", **task)
    ends = time.monotonic() + WAIT_S
    while program.hear()["stats"]["num_generated_tokens"] < before + 20:
        assert time.monotonic() < ends
        program.tell("look")

"""Batch jobs in processes of their own, and the actors that work for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from raypp.actors.processes import LocalProcess, with_descendants

DEADLINE_S = 150.0


def start_job(input_path: Path, output_path: Path, *options: str, env: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start `python -m raypp.batch` on two stages of the embedded model, greedy."""
    command = [sys.executable, "-m", "raypp.batch", "tiny", "--num-stages", "2", "--temperature", "0"]
    files = ["--input", str(input_path), "--output", str(output_path), "--progress-interval", "1"]
    return subprocess.Popen(
        [*command, *files, *options], env={**os.environ, **env}, stderr=subprocess.PIPE, text=True, errors="replace"
    )


def write_prompts(path: Path, prompts: Iterable[str], **fields: Any) -> None:
    """Write an input whose line `i` has the id `line-i`."""
    with path.open("w") as file:
        for index, prompt in enumerate(prompts):
            file.write(json.dumps({"custom_id": f"line-{index}", "prompt": prompt, **fields}) + "\n")


def num_lines(path: Path) -> int:
    """Return how many whole lines a file has."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def texts_by_id(path: Path) -> dict[str, str]:
    """Return the texts of an output; every id must be there once, with an answer."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    texts = {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in lines}
    assert len(texts) == len(lines), "an id is there twice"
    return texts


def lines_that_failed(output: Path) -> list[int]:
    """Return which lines of the input, from 1, are in the error file of an output."""
    errors = output.with_name(output.name + ".errors.jsonl")
    return sorted(json.loads(line)["error"]["line"] for line in errors.read_text().splitlines())


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = DEADLINE_S, poll_s: float = 0.02) -> Any:
    """Return the condition's first true value."""
    ends = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < ends, f"timed out waiting for {what}"
        time.sleep(poll_s)
    return value


def actors_below(ancestor: int, name: str) -> list[int]:
    """Return the processes of an actor class that descend from a process: other Rays on the machine are not ours."""
    below = with_descendants([LocalProcess.of_pid(ancestor)])
    return [process.pid for process in below if f"ray::{name}" in process.command()]

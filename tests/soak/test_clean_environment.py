"""A fresh clone in a new environment does what the README says first."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.part("docs")

ROOT = Path(__file__).parents[2]


def test_a_fresh_clone_generates_text(tmp_path: Path, note: Callable[[str], None]) -> None:
    clone = tmp_path / "raypp"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True, timeout=120)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    started = time.monotonic()
    done = subprocess.run(["make", "demo"], cwd=clone, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    note(f"`make demo` in a fresh clone: {time.monotonic() - started:.0f} s")
    text, _, what_is_next = done.stdout.partition("\nThat was `tiny`")
    assert "def main(" in text
    assert "make install" in what_is_next
    listed = subprocess.run(
        [clone / ".venv/bin/python", "-m", "pip", "list"], env=environment, capture_output=True, text=True, timeout=120
    ).stdout
    installed = {line.split()[0].lower() for line in listed.splitlines() if line}
    assert "raypp" in installed
    assert not installed & {"triton", "matplotlib", "playwright", "schemathesis", "pytest"}

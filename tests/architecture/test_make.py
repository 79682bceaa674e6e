"""What `make demo` and `make install` install, each once. Stand-ins for pip and raypp log their calls."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT

STAND_IN = """#!/bin/sh
if [ "$1" = -c ]; then exec {python} "$@"; fi
echo "$(basename "$0") $*" >> calls
"""


class Checkout:
    """A folder with what make reads, and a .venv of stand-ins."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("Makefile", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, folder)
        (folder / ".venv/bin").mkdir(parents=True)
        for name in ("python", "raypp"):
            path = folder / ".venv/bin" / name
            path.write_text(STAND_IN.format(python=sys.executable))
            path.chmod(0o755)

    def make(self, target: str) -> tuple[str, str]:
        """Return what a target calls, and what it prints."""
        calls = self.folder / "calls"
        calls.write_text("")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
        done = subprocess.run(
            ["make", target], cwd=self.folder, env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return calls.read_text(), done.stdout

    def demo_packages(self) -> set[str]:
        lines = (self.folder / ".venv/demo.txt").read_text().split()
        return {line.partition(">")[0] for line in lines}


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_demo_installs_what_text_needs_and_says_what_is_next(checkout: Checkout) -> None:
    calls, said = checkout.make("demo")
    assert "[dev]" not in calls
    assert "editable_mode=compat --editable ." in calls, "else nothing imports from the folder above the clone"
    assert "raypp generate tiny --num-stages 2" in calls
    packages = checkout.demo_packages()
    assert {"ray", "torch", "transformers"} <= packages
    assert "llguidance" in packages, "structured outputs are served, too"
    for next_step in ("make install", "raypp serve tiny", "http://localhost:8000/", "Qwen/", "examples/README.md"):
        assert next_step in said
    assert "pip" not in checkout.make("demo")[0], "installed once"


def test_install_adds_the_rest_and_demo_then_needs_no_more(checkout: Checkout) -> None:
    checkout.make("demo")
    calls, _ = checkout.make("install")
    assert "editable_mode=compat --editable .[dev]" in calls
    assert "compileall" in calls, "also of what demo left uncompiled"
    os.utime(checkout.folder / ".venv/.installed", (1, 1))
    assert "--editable .[dev]" in checkout.make("demo")[0], "what changed since is installed, as install does it"
    assert "pip" not in checkout.make("demo")[0]

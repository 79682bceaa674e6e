"""Writes down when soak last ran, at which commit, and what it printed."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

_FOLDER = Path(__file__).resolve().parent
_REPORT = _FOLDER / "last_run.md"
_ROOT = _FOLDER.parents[1]
_figures = pytest.StashKey[list[str]]()
_begun = pytest.StashKey[float]()


@pytest.fixture(scope="session")
def note(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Take a line of figures for the report."""
    return request.config.stash[_figures].append


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_figures], config.stash[_begun] = [], time.monotonic()


def _runs_all(config: pytest.Config) -> bool:
    option = config.option
    if option.keyword or option.markexpr or option.deselect or option.ignore or option.collectonly:
        return False
    named = {(config.invocation_params.dir / arg).resolve() for arg in config.args}
    return not named.isdisjoint({_FOLDER, *_FOLDER.parents})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Write the report if all of soak has run."""
    if not _runs_all(config):
        return
    rows = []
    for outcome in ("passed", "failed", "skipped", "error"):
        for report in terminalreporter.stats.get(outcome, []):
            if report.when == "call" or outcome != "passed":
                reason = report.longrepr[2] if outcome == "skipped" else ""
                rows.append(f"| `{report.nodeid}` | {outcome} | {report.duration:.0f} | {reason} |")
    git = ["git", "-C", str(_ROOT), "log", "-1", "--format=%h"]
    commit = subprocess.run(git, capture_output=True, text=True, timeout=30).stdout.strip() or "unknown"
    minutes = (time.monotonic() - config.stash[_begun]) / 60
    lines = [
        "# The last run of `make soak`",
        "",
        f"{time.strftime('%Y-%m-%d')}, commit {commit}, {os.cpu_count()} cores, {minutes:.0f} minutes.",
        "",
        *(f"- {line}" for line in config.stash[_figures]),
        "",
        "| test | outcome | seconds | reason |",
        "|---|---|---|---|",
        *sorted(rows),
    ]
    _REPORT.write_text("\n".join(lines) + "\n")

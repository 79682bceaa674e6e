"""The parts of soak, and a report: for each part when it last ran, at which commit, and what it printed."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

PARTS = {
    "clients": "real client packages, a hostile client",
    "models": "parity with transformers, recorded texts",
    "chaos": "deaths, busy machines, waiting requests",
    "docs": "documents that run, clean environments, wheels",
    "sizes": "kernels, graphs and other unit tests in full size",
}
_FOLDER = Path(__file__).resolve().parent
_REPORT = _FOLDER / "last_run.md"
_ROOT = _FOLDER.parents[1]
_HEADING = "# The last run of each part of `make soak`\n"


class _Report:
    """What the tests of each part noted, and what came of them."""

    def __init__(self) -> None:
        self.part = ""  # of the test that runs
        self.notes: dict[str, list[str]] = {part: [] for part in PARTS}
        self.rows: dict[str, list[str]] = {part: [] for part in PARTS}
        self.seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self.part_of: dict[str, str] = {}

    def section(self, part: str, commit: str) -> str:
        """Return a part's section of the report."""
        minutes = self.seconds[part] / 60
        where = f"commit {commit}, {os.cpu_count()} cores, {minutes:.0f} minutes"
        head = f"## {part}: {PARTS[part]}\n\n{time.strftime('%Y-%m-%d')}, {where}.\n\n"
        notes = "".join(f"- {line}\n" for line in self.notes[part])
        rows = "".join(f"{row}\n" for row in sorted(self.rows[part]))
        return f"{head}{notes}\n| test | outcome | seconds | reason |\n|---|---|---|---|\n{rows}"


_report = pytest.StashKey[_Report]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", choices=list(PARTS), help="run one part of soak")


@pytest.fixture(scope="session")
def note(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Take a line of figures for the report."""
    report = request.config.stash[_report]

    def take(line: str) -> None:
        report.notes[report.part].append(line)

    return take


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "part(name): the part of soak that a test belongs to")
    config.stash[_report] = _Report()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give each test its part, and keep those of the part that is asked for."""
    report, asked = config.stash[_report], config.getoption("--part")
    left_out = []
    for item in list(items):
        if _FOLDER not in item.path.parents:
            continue
        mark = item.get_closest_marker("part")
        if mark is None or mark.args[0] not in PARTS:
            raise pytest.UsageError(f"{item.nodeid} has no mark part: one of {', '.join(PARTS)}")
        report.part_of[item.nodeid] = mark.args[0]
        if asked and mark.args[0] != asked:
            items.remove(item)
            left_out.append(item)
    config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Know whose figures are noted."""
    report = item.config.stash[_report]
    report.part = report.part_of.get(item.nodeid, report.part)


def _replaced_parts(config: pytest.Config) -> list[str]:
    """Return the parts of which every test has run."""
    option = config.option
    if option.keyword or option.markexpr or option.deselect or option.ignore or option.collectonly:
        return []
    named = {(config.invocation_params.dir / arg).resolve() for arg in config.args}
    if named.isdisjoint({_FOLDER, *_FOLDER.parents}):
        return []
    return [option.part] if option.part else list(PARTS)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Replace the sections of the parts that have run."""
    parts = _replaced_parts(config)
    if not parts:
        return
    report = config.stash[_report]
    for outcome in ("passed", "failed", "skipped", "error"):
        for done in terminalreporter.stats.get(outcome, []):
            if done.nodeid not in report.part_of:
                continue
            report.seconds[report.part_of[done.nodeid]] += done.duration
            if done.when == "call" or outcome != "passed":
                reason = done.longrepr[2] if outcome == "skipped" else ""
                row = f"| `{done.nodeid}` | {outcome} | {done.duration:.0f} | {reason} |"
                report.rows[report.part_of[done.nodeid]].append(row)
    git = ["git", "-C", str(_ROOT), "log", "-1", "--format=%h"]
    commit = subprocess.run(git, capture_output=True, text=True, timeout=30).stdout.strip() or "unknown"
    old = _REPORT.read_text() if _REPORT.exists() else ""
    found = re.finditer(r"^## (\w+):.*?(?=^## |\Z)", old, re.MULTILINE | re.DOTALL)
    sections = {match[1]: match[0].rstrip("\n") + "\n" for match in found}
    sections |= {part: report.section(part, commit) for part in parts}
    _REPORT.write_text("\n".join([_HEADING, *(sections[part] for part in PARTS if part in sections)]))

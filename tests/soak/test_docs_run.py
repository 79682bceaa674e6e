"""The code blocks of README.md run in order, as a reader would run them; with TEST_DOCS=all, those of docs/*.md, too.

TEST_DOCS=docs/serving.md runs one page. Blocks of a page share a folder, in which the repository's files are links.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from code_blocks import Block, blocks_of, documents
from repository import ROOT, name_of

pytestmark = pytest.mark.part("docs")

_BLOCK_TIMEOUT_S = 300
_END_TIMEOUT_S = 60


def _pages() -> list[Path]:
    asked = os.environ.get("TEST_DOCS", "README.md")
    return [page for page in documents() if asked == "all" or name_of(page) == asked]


def _blocks(page: Path) -> list[Block]:
    return [block for block in blocks_of(page) if block.is_run_here]


@pytest.mark.parametrize("page", [page for page in _pages() if _blocks(page)], ids=name_of)
def test_the_code_blocks_of_a_page_run(page: Path, tmp_path: Path, note: Callable[[str], None]) -> None:
    for entry in ROOT.iterdir():
        if entry.name not in (".venv", ".git", "build"):
            (tmp_path / entry.name).symlink_to(entry)
    begun = time.monotonic()
    for block in _blocks(page):
        _run(block, tmp_path)
    note(f"{len(_blocks(page))} code blocks of {name_of(page)}: {time.monotonic() - begun:.0f} s")


def _run(block: Block, folder: Path) -> None:
    script = folder / f"block_{block.line}.{block.language[:2]}"
    script.write_text(block.text)
    program = ["bash", "-euo", "pipefail"] if block.language == "sh" else [sys.executable]
    environment = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "PYTHONPATH")}
    environment |= {"PATH": f"{sys.prefix}/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    output = folder / "output.txt"
    with output.open("w") as file, _group([*program, str(script)], folder, environment, file) as process:
        code = process.wait(_BLOCK_TIMEOUT_S)
    assert code == 0, f"{block.name} ended with {code}:\n{block.text}\n{output.read_text()[-3000:]}"


@contextmanager
def _group(command: list[str], folder: Path, environment: dict[str, str], output) -> Iterator[subprocess.Popen]:
    """Run a command in a session of its own; at the end, end what it left running, and wait for that."""
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            _end_group(process)


def _end_group(process: subprocess.Popen) -> None:
    end_by = time.monotonic() + _END_TIMEOUT_S
    number = int(signal.SIGTERM)
    while _send(process.pid, number) and number != signal.SIGKILL:
        process.poll()
        number = 0 if time.monotonic() < end_by else int(signal.SIGKILL)
        time.sleep(0.2)


def _send(group: int, number: int) -> bool:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True

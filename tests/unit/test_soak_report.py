"""What `make soak` reports replaces the last report of each part that has run as a whole."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "soak" / "conftest.py"
TESTS = """
import pytest

@pytest.mark.part("chaos")
def test_a(note):
    note("a's figures")

@pytest.mark.part("docs")
def test_b(note):
    note("b's figures")
"""


def _soak(folder: Path, arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(folder), *arguments.split()]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # they take seconds to be imported
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


@pytest.fixture
def soak(tmp_path: Path) -> Path:
    folder = tmp_path / "tests" / "soak"
    folder.mkdir(parents=True)
    shutil.copy(CONFTEST, folder)
    (folder / "test_one.py").write_text(TESTS)
    return folder


@pytest.mark.parametrize(
    "arguments",
    ["tests/soak/test_one.py", "tests/soak/test_one.py::test_a", "tests/soak -k test_a", "tests/soak --collect-only"],
)
def test_some_tests_of_a_part_replace_no_report(soak: Path, arguments: str) -> None:
    done = _soak(soak.parents[1], arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (soak / "last_run.md").exists()


def test_a_part_replaces_its_own_section(soak: Path) -> None:
    assert _soak(soak.parents[1], "tests/soak").returncode == 0
    whole = (soak / "last_run.md").read_text()
    assert (
        whole.index("## chaos") < whole.index("- a's figures") < whole.index("## docs") < whole.index("- b's figures")
    )
    (soak / "test_one.py").write_text(TESTS.replace("'s figures", "'s new figures"))
    done = _soak(soak.parents[1], "tests/soak --part docs")
    assert "1 passed, 1 deselected" in done.stdout
    assert (soak / "last_run.md").read_text() == whole.replace("b's figures", "b's new figures")


def test_a_test_without_a_part_is_refused(soak: Path) -> None:
    (soak / "test_two.py").write_text("def test_c():\n    pass\n")
    done = _soak(soak.parents[1], "tests/soak")
    assert "test_c has no mark part: one of clients, models, chaos, docs, sizes" in done.stderr + done.stdout

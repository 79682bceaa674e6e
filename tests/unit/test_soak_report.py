"""What `make soak` reports replaces the last report only if all of soak has run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "soak" / "conftest.py"


@pytest.mark.parametrize(
    ("arguments", "is_written"),
    [
        ("tests/soak", True),
        ("tests/soak/test_one.py", False),
        ("tests/soak/test_one.py::test_a", False),
        ("tests/soak -k test_a", False),
        ("tests/soak --collect-only", False),
    ],
)
def test_part_of_soak_does_not_replace_the_report(tmp_path: Path, arguments: str, is_written: bool) -> None:
    folder = tmp_path / "tests" / "soak"
    folder.mkdir(parents=True)
    shutil.copy(CONFTEST, folder)
    (folder / "test_one.py").write_text("def test_a():\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), *arguments.split()]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # they take seconds to be imported
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "last_run.md").exists() == is_written

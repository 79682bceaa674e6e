"""Files stay small, say what they are for, and fit on every machine."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest
from repository import ROOT, name_of, package_modules, project_files

MAX_LINES = 700
MAX_FILE_BYTES = 2_000_000
LARGE_FILES = (
    "raypp/assets/tiny/model.safetensors",
    "raypp/assets/tiny-vl/model.safetensors",
)

# A home directory, a temporary or mounted folder of one machine, an address in a private network.
MACHINE_PATH = re.compile(
    r"(?<![\w.])/(home|Users|root|mnt|work|workspace|scratch)/[\w.-]+|\b10(\.\d{1,3}){3}\b|\b192\.168(\.\d{1,3}){2}\b"
)


def test_modules_are_small() -> None:
    too_long = {}
    for path in package_modules():
        num_lines = len(path.read_text().splitlines())
        if num_lines > MAX_LINES:
            too_long[name_of(path)] = f"{num_lines} lines, at most {MAX_LINES}"
    assert not too_long


def test_modules_say_what_they_are_for() -> None:
    silent = []
    for path in package_modules():
        tree = ast.parse(path.read_text())
        if ast.get_docstring(tree) is None:
            silent.append(name_of(path))
    assert not silent


def test_no_module_is_a_drawer() -> None:
    drawers = {"utils.py", "util.py", "common.py", "helpers.py", "misc.py"}
    assert not [name_of(path) for path in package_modules() if path.name in drawers]


def test_no_two_modules_have_one_name() -> None:
    """A name is enough to find a module. A command's module is named as the command is."""
    names = Counter(path.name for path in package_modules() if path.parent.name != "cli")
    assert [name for name, count in names.items() if count > 1] == ["__init__.py"]


def test_no_path_of_one_machine() -> None:
    found = []
    for path in project_files():
        if path.suffix in (".safetensors", ".png") or path.parent.name == "tiny" or path == Path(__file__):
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if MACHINE_PATH.search(line):
                found.append(f"{name_of(path)}:{number}: {line.strip()[:120]}")
    assert not found


@pytest.mark.parametrize("text", ["see /home/jane/model", "open('/mnt/disk/x')", "host 10.1.2.3", "192.168.0.7:80"])
def test_machine_paths_are_recognized(text: str) -> None:
    assert MACHINE_PATH.search(text)


@pytest.mark.parametrize("text", ["docs/home/page", "a/mnt", "version 1.10.1.2", "https://example.org/work/", "/tmp/x"])
def test_ordinary_text_is_no_machine_path(text: str) -> None:
    assert not MACHINE_PATH.search(text)


def test_large_files_are_there_on_purpose() -> None:
    large = [name_of(path) for path in project_files() if path.stat().st_size > MAX_FILE_BYTES]
    assert set(large) <= set(LARGE_FILES)


def test_test_modules_have_names_of_their_own() -> None:
    """Pytest imports them by their bare names: of two alike it refuses the second, and with it the whole run."""
    names = Counter(path.name for path in project_files(".py") if name_of(path).startswith("tests/"))
    assert not [name for name, count in names.items() if count > 1 and name != "conftest.py"]


def test_source_is_ascii() -> None:
    assert not [name_of(path) for path in package_modules() if not path.read_text().isascii()]


def test_soak_runs_what_ci_leaves_out():
    full_sizes = (ROOT / "tests/soak/test_full_sizes.py").read_text()
    marked = re.compile(r"^@pytest\.mark\.full$|pytest\.mark\.(?:full|in_ci)\b|^from sizes import", re.MULTILINE)
    names = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py") if marked.search(path.read_text())}
    assert names
    assert {name for name in names if f'"{name}"' not in full_sizes} == set()

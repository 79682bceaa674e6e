"""What the documents tell people to run and to read is there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from repository import ROOT, name_of, package_modules, project_files

FENCE = re.compile(r"^```(?:sh|bash|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)")

DOCUMENTS = project_files(".md")


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def commands(document: Path) -> list[list[str]]:
    """Return the commands of a document's shell blocks, without comments."""
    lines = "\n".join(FENCE.findall(document.read_text())).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line.removeprefix("$ "), comments=True))]


def test_readme_names_the_two_commands() -> None:
    assert [command for command in commands(ROOT / "README.md") if command[0] == "make"][:2] == [
        ["make", "demo"],
        ["make", "test"],
    ]


def test_make_targets_in_documents_exist() -> None:
    unknown = []
    for document in DOCUMENTS:
        blocks = [" ".join(command) for command in commands(document)]
        inline = re.findall(r"`(make [a-z][^`]*)`", document.read_text())
        for call in blocks + inline:
            words = call.split()
            targets = [word for word in words[1:] if "=" not in word] if words[0] == "make" else []
            unknown += [f"{name_of(document)}: make {target}" for target in targets if target not in make_targets()]
    assert not unknown


def test_scripts_in_documents_and_makefile_exist() -> None:
    texts = {name_of(document): document.read_text() for document in DOCUMENTS} | {
        "Makefile": (ROOT / "Makefile").read_text()
    }
    named = {
        (where, script)
        for where, text in texts.items()
        for script in re.findall(r"\b(?:benchmarks|tools|examples|configs)/[\w/.-]+\.(?:py|toml)\b", text)
    }
    assert not [f"{where}: {script}" for where, script in named if not (ROOT / script).is_file()]


def test_links_in_documents_lead_somewhere() -> None:
    dead = [
        f"{name_of(document)}: {target}"
        for document in DOCUMENTS
        for target in LINK.findall(document.read_text())
        if not (document.parent / target).exists()
    ]
    assert not dead


def test_the_package_map_is_complete() -> None:
    """Every package and top-level module of raypp has its line in docs/architecture.md, and no other has."""
    mapped = set(
        re.findall(r"^\| `raypp/(\w+)(?:/|\.py)` \|", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE)
    )
    modules = [
        path.relative_to(ROOT / "raypp").parts for path in package_modules() if name_of(path).startswith("raypp/")
    ]
    there = {parts[0].removesuffix(".py") for parts in modules} - {"__init__", "__main__"}
    assert mapped == there


def test_the_architecture_is_one_page_and_its_paths_exist() -> None:
    """Details belong into docstrings and design records."""
    lines = (ROOT / "docs/architecture.md").read_text().splitlines()
    assert len(lines) < 250
    assert not [number for number, line in enumerate(lines, 1) if len(line) >= 120]
    paths = re.findall(r"`([\w-]+(?:/[\w-]+)*(?:/|\.(?:py|md|json|toml)))`", "\n".join(lines))
    assert len(paths) > 100
    assert not [path for path in paths if not (ROOT / path).exists() and not (ROOT / "raypp" / path).exists()]


def test_design_records_that_code_names_exist() -> None:
    there = {path.name[:4] for path in (ROOT / "docs/design").glob("[0-9]*.md")}
    dead = [
        f"{name_of(path)}: {number}"
        for path in project_files(".py")
        for number in re.findall(r"\bdocs/design/(\d{4})", path.read_text())
        if number not in there
    ]
    assert not dead


@pytest.mark.parametrize("record", sorted((ROOT / "docs/design").glob("[0-9]*.md")), ids=lambda path: path.stem)
def test_design_records_have_all_parts(record: Path) -> None:
    text = record.read_text()
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert [h for h in headings if h in ("Context", "Options", "Decision", "Evidence")] == [
        "Context",
        "Options",
        "Decision",
        "Evidence",
    ]
    assert re.match(rf"# {record.name[:4]}: ", text), "the title starts with the record's number"


def test_design_records_have_their_own_numbers() -> None:
    numbers = [path.name[:4] for path in (ROOT / "docs/design").glob("[0-9]*.md")]
    assert len(numbers) == len(set(numbers))

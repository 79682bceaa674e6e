"""What the documents tell people to run and to read is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from code_blocks import blocks_of, documents
from code_blocks import commands as commands_of
from repository import ROOT, name_of, package_modules, project_files

LINK = re.compile(r"""(?:\]\(| src="| srcset=")(?!https?://|#|mailto:)([^)#\s"]+)""")

DOCUMENTS = project_files(".md")


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def commands(document: Path) -> list[list[str]]:
    """Return the commands of a document's shell blocks, without comments."""
    return [words for block in blocks_of(document) if block.language == "sh" for words in commands_of(block.text)]


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


def test_links_to_sections_lead_somewhere() -> None:
    """A link's part behind # is a heading of the page: lower case, without punctuation, with - for spaces."""
    dead = []
    for document in DOCUMENTS:
        for target, section in re.findall(r"\]\((?!https?://|mailto:)([^)#\s]*)#([^)\s]+)\)", document.read_text()):
            page = document.parent / target if target else document
            text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
            headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            if section not in slugs:
                dead.append(f"{name_of(document)}: {target}#{section}")
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


def test_every_design_record_is_in_the_index_once() -> None:
    index = (ROOT / "docs/design/README.md").read_text()
    listed = re.findall(r"^\| \[(\d{4})\]\((\1-[\w-]+\.md)\) \| \S", index, re.MULTILINE)
    assert sorted(name for _, name in listed) == sorted(
        path.name for path in (ROOT / "docs/design").glob("[0-9]*.md")
    ), "docs/design/README.md has one line per record, `| [NNNN](NNNN-title.md) | what was decided |`"


def test_design_records_are_one_page() -> None:
    """Full tables of measurements go into benchmarks/REPORT.md."""
    too_long = {
        path.name: len(lines)
        for path in sorted((ROOT / "docs/design").glob("[0-9]*.md"))
        if len(lines := path.read_text().splitlines()) > 60
    }
    assert not too_long


def test_performance_is_one_page() -> None:
    assert len((ROOT / "docs/performance.md").read_text().splitlines()) <= 150


def test_lines_of_documents_are_short() -> None:
    """Tables and code blocks may be longer."""
    pages = [*documents(), *(ROOT / "docs/design").glob("*.md"), ROOT / "benchmarks/REPORT.md"]
    too_long = [
        f"{name_of(page)}: {line[:60]}"
        for page in pages
        for line in re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL).splitlines()
        if len(line) > 120 and not line.startswith("|")
    ]
    assert not too_long


def test_tables_of_figures_are_current() -> None:
    command = [sys.executable, str(ROOT / "tools" / "make_performance_tables.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr

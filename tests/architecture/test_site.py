"""What the site needs is there; tests/soak/test_docs_site.py builds it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import yaml
from repository import ROOT, name_of, project_files
from site_pages import files_beside, on_page_markdown, repository_path, site_links, site_path

import raypp.errors

CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def pages_of(entries: Any) -> Iterator[str]:
    """Yield the files of a navigation, of all depths."""
    if isinstance(entries, str):
        yield entries
    elif isinstance(entries, dict):
        for entry in entries.values():
            yield from pages_of(entry)
    else:
        for entry in entries:
            yield from pages_of(entry)


def test_every_page_is_in_the_navigation_once() -> None:
    pages = [name_of(path).removeprefix("docs/") for path in project_files(".md") if path.parent == ROOT / "docs"]
    named = [*pages_of(CONFIG["nav"])]
    assert sorted(named) == sorted([*pages, "index.md", "design/README.md"])


def test_the_site_is_built_where_git_does_not_look() -> None:
    assert (CONFIG["docs_dir"], CONFIG["site_dir"]) == ("docs", "build/site")
    assert "/build/" in (ROOT / ".gitignore").read_text().splitlines()
    assert CONFIG["theme"]["font"] is False


def test_links_out_of_docs_are_followed_in_the_site() -> None:
    for path, there in {
        "README.md": "index.md",
        "docs/design/README.md": "design/README.md",
        "a/b": "source/a/b",
    }.items():
        assert (site_path(path), repository_path(there)) == (there, path)
    linked = files_beside(name_of(path) for path in project_files(".md") if name_of(path).startswith("docs/"))
    assert {"README.md", "CONTRIBUTING.md", "benchmarks/REPORT.md", "configs/serve.yaml"} <= linked
    text = "[a](../README.md#b) [c](../tests) [d](https://e.f)"
    assert site_links("docs/a.md", text) == "[a](index.md#b) c [d](https://e.f)"
    image = "docs/images/timeline.png"
    for form in ("![a]({})", '<img src="{}">', '<source media="m" srcset="{}">'):
        assert site_links("README.md", form.format(image)) == form.format("images/timeline.png")


def test_the_search_finds_the_manual_not_design_records() -> None:
    def is_left_out(uri: str) -> bool:
        page = SimpleNamespace(file=SimpleNamespace(src_uri=uri), meta={})
        on_page_markdown("", page)
        return page.meta == {"search": {"exclude": True}}

    assert not any(map(is_left_out, ("fit.md", "index.md", "design/README.md")))
    assert all(map(is_left_out, ("design/0001-ray-places-zmq-steps.md", "source/CONTRIBUTING.md")))


def test_every_error_class_has_its_meaning_cause_and_cure() -> None:
    there = {
        name
        for name, value in vars(raypp.errors).items()
        if isinstance(value, type) and issubclass(value, raypp.errors.RayppError)
    }
    text = (ROOT / "docs/troubleshooting.md").read_text()
    sections = dict(re.findall(r"^### (\w+)\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL))
    assert sections.keys() == there
    said = {name: re.findall(r"^- \*\*(\w+)\*\*: \S", section, re.MULTILINE) for name, section in sections.items()}
    assert said == {name: ["Means", "Causes", "Cure"] for name in there if name != "RayppError"} | {"RayppError": []}


def test_the_python_api_has_every_public_name() -> None:
    """Errors come with their module."""
    named = set(re.findall(r"^::: raypp\.(\w+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE))
    errors = {name for name in raypp.__all__ if hasattr(raypp.errors, name)}
    assert named == set(raypp.__all__) - errors - {"__version__"} | {"errors"}


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150

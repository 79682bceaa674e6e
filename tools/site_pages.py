"""A hook of mkdocs: README.md is the site's start page, and files outside docs/ that pages link to come along.

Links stay as they are in the repository, so that they work on a code host, too. In the site, a file of docs/ keeps its
path, README.md is index.md, and any other file lies under source/.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
_START = "README.md"
_LINK = re.compile(r"""(?:(?<=\]\()|(?<=<img src=")|(?<=srcset="))(?!https?:|mailto:|#)([^)#\s"]+)""")
_WHOLE_LINK = re.compile(r"(?<!!)\[([^\[\]]*)\]\((?!https?:|mailto:|#)([^)#\s]+)\)")


def site_path(path: str) -> str:
    """Return where a file of the repository is in the site: both paths are relative to their roots."""
    if path == _START:
        return "index.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}"


def repository_path(site: str) -> str:
    """Return which file of the repository a file of the site is: the inverse of `site_path`."""
    if site == "index.md":
        return _START
    return site.removeprefix("source/") if site.startswith("source/") else f"docs/{site}"


def linked_files(path: str, text: str) -> list[str]:
    """Return the files of the repository, by path, that a Markdown file links to; those that exist."""
    folder = posixpath.dirname(path)
    linked = [posixpath.normpath(posixpath.join(folder, target)) for target in _LINK.findall(text)]
    return [file for file in linked if (_ROOT / file).is_file()]


def files_beside(pages: Iterable[str]) -> set[str]:
    """Return the files that the start page and other pages link to and so on from there, without those pages."""
    there, left = set(pages), {_START}
    left |= there
    read = set[str]()
    while left:
        path = left.pop()
        read.add(path)
        if path.endswith(".md"):
            left |= {*linked_files(path, (_ROOT / path).read_text(encoding="utf-8"))} - read
    return read - there


def site_links(path: str, text: str) -> str:
    """Return a Markdown file with its links as they must be in the site, which has no pages for folders."""
    folder = posixpath.dirname(path)
    site_folder = posixpath.dirname(site_path(path))

    def moved(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[1]))
        if not (_ROOT / target).is_file():
            return link[1]  # mkdocs tells of it
        return posixpath.relpath(site_path(target), site_folder or ".")

    def without_folder(link: re.Match[str]) -> str:
        return link[1] if (_ROOT / posixpath.join(folder, link[2])).is_dir() else link[0]

    return _LINK.sub(moved, _WHOLE_LINK.sub(without_folder, text))


def on_files(files: Any, config: Any) -> Any:
    """Add the start page and whatever pages link to outside docs/."""
    from mkdocs.structure.files import File

    for path in sorted(files_beside(repository_path(file.src_uri) for file in files)):
        files.append(File.generated(config, site_path(path), abs_src_path=str(_ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite a page's links. The search finds the manual, not design records and sources."""
    if page.file.src_uri.startswith(("design/0", "source/")):
        page.meta["search"] = {"exclude": True}
    return site_links(repository_path(page.file.src_uri), markdown)

"""What the scripts that write pages have in common: they write them, or with --check say which are not current."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path


def write_or_check(doc: str | None, pages: Mapping[Path, Callable[[str], str]]) -> int:
    """Write the pages, or check them; return the exit code.

    Args:
        doc: The script's documentation.
        pages: By path, what returns the page's text, given the text that is there, or "". A ValueError says what is
            wrong with that.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if a page is not current")
    is_check = parser.parse_args().check
    status = 0
    for path, render in pages.items():
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        try:
            rendered = render(text)
        except ValueError as error:
            print(f"{path.name}: {error}", file=sys.stderr)
            return 1
        if rendered != text and is_check:
            print(f"{path.name} is not current: run python {sys.argv[0]}")
            status = 1
        elif rendered != text:
            path.write_text(rendered, encoding="utf-8")
    return status

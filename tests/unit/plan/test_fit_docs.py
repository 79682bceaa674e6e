"""docs/fit.md says what the plans say."""

from __future__ import annotations

import make_fit_docs


def test_the_page_is_current() -> None:
    assert make_fit_docs.PATH.read_text(encoding="utf-8") == make_fit_docs.render(), "python tools/make_fit_docs.py"


def test_no_line_but_a_tables_is_long() -> None:
    lines = make_fit_docs.render().splitlines()
    assert not [line for line in lines if len(line) > 120 and not line.startswith("|")]

"""docs/models.md names the types of models that tests try."""

from __future__ import annotations

from pathlib import Path

from test_any_decoder import IN_CI, IN_SOAK

PAGE = Path(__file__).parents[3] / "docs/models.md"


def test_the_page_names_what_is_tried() -> None:
    (row,) = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| cohere2,")]
    columns = [column.strip().split(", ") for column in row.strip("|").split("|")]
    assert columns == [sorted(IN_CI), sorted(IN_SOAK)]

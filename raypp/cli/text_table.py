"""Tables of plain text, as commands print them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence


def table_lines(rows: Sequence[Mapping[str, object]], indent: str) -> Iterator[str]:
    """Yield a line with the names of all columns, and one per row, aligned to the right; `-` where a row has none."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [columns, *([cell_text(row.get(name)) for name in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        yield indent + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))


def cell_text(value: object) -> str:
    """Return a value as text: whole numbers with commas, `-` for None and for an empty list."""
    if value is None or value == []:
        return "-"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)

"""`raypp info`: what an engine would be, without starting it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import Any

from raypp.cli.engine_options import add_engine_options, engine_config


def add_parser(commands: Any) -> None:
    """Add the command to the parser's subcommands."""
    parser = commands.add_parser(
        "info",
        help="show configuration, plan and hardware",
        description="Show the resolved configuration, the plan of layers and memory per stage, and the hardware. "
        "Starts nothing.",
    )
    add_engine_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Describe and print."""
    description = args.doors.describe(engine_config(args))
    if args.json:
        print(json.dumps(description, indent=2))
    else:
        print("\n".join(_lines(description)))
    return 0


def _lines(values: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Yield one line per value: mappings as indented blocks, lists of mappings as tables."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield f"{indent}{name}"
            yield from _lines(value, indent + "  ")
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            yield f"{indent}{name}"
            yield from _table(value, indent + "  ")
        else:
            yield f"{indent}{name}: {_text(value)}"


def _table(rows: list[Mapping[str, Any]], indent: str) -> Iterator[str]:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [columns, *([_text(row.get(name)) for name in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        yield indent + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)

"""`raypp info`: what an engine would be, without starting it; with `--start` also what its graphs took."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from raypp.cli.engine_options import add_engine_options, engine_config
from raypp.config.engine_config import EngineConfig


def add_parser(commands: Any) -> None:
    """Add the command to the parser's subcommands."""
    parser = commands.add_parser(
        "info",
        help="show configuration, plan and hardware",
        description="Show the resolved configuration, the plan of layers and memory per stage, and the hardware. "
        "Starts nothing, but with --start.",
    )
    parser.add_argument(
        "--start",
        action="store_true",
        help="also start the engine: how long that takes, and time and memory of its CUDA graphs by stage and mode",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Describe and print."""
    config = engine_config(args)
    description = args.doors.describe(config)
    if not args.json:
        print("\n".join(_lines(description)), flush=True)  # also if the engine does not start
    if args.start:
        started = _start(args, config, description)
        if not args.json:
            print("\n".join(_lines({"started": started})))
        description["started"] = started
    if args.json:
        print(json.dumps(description, indent=2))
    return 0


def _start(args: argparse.Namespace, config: EngineConfig, description: Mapping[str, Any]) -> dict[str, Any]:
    """Start the engine, end it, and return what its start took; its plan, too, where the cluster made another of it."""
    begun = time.perf_counter()
    with args.doors.open_llm(config) as llm:
        started: dict[str, Any] = {"seconds": round(time.perf_counter() - begun, 1)}
        if (plan := llm.plan()) != description["plan"]:
            started["plan"] = plan
        started["graphs"] = _graphs(llm.stats()["stages"])
    return started


def _graphs(stages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what each stage's recordings took, a row per stage and mode: none on a CPU by default."""
    return [
        {
            "stage_index": stage_index,
            "mode": mode,
            "num_graphs": cost["num_graphs"],
            "seconds": round(cost["seconds"], 2),
            "gib": round(cost["memory_bytes"] / 2**30, 3),
            "num_left_out": cost["num_left_out"],
        }
        for stage_index, stage in enumerate(stages)
        for mode, cost in stage["graphs"].items()
    ]


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
    if value is None or value == []:
        return "-"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)

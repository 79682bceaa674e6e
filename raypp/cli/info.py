"""`raypp info`: whether a model fits, and what an engine would be, without starting it.

Exit codes: 0 it fits; 1 it does not; 2 it can fit no machine: a mistake that the message explains.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from raypp.cli.engine_options import add_engine_options, engine_config
from raypp.cli.fit_text import cell_text, fit_lines, table_lines
from raypp.config.engine_config import EngineConfig
from raypp.errors import ConfigError
from raypp.plan.hardware import read_machines

_DOES_NOT_FIT = 1


def add_parser(commands: Any) -> None:
    """Add the command to the parser's subcommands."""
    parser = commands.add_parser(
        "info",
        help="say whether a model fits, and what an engine would be",
        description="Say whether a model fits the GPUs: memory per stage, how many requests of which length run at "
        "once, and what would fit if it does not. Reads config.json, and the tokenizer where "
        "the weights are beside it. Starts nothing, but with --start.",
    )
    parser.add_argument(
        "--gpus",
        metavar="NxMEMORY",
        help="plan for GPUs that are not here: 4x80GB; 2x24GB+2x24GB are two machines",
    )
    parser.add_argument(
        "--start",
        action="store_true",
        help="also start the engine: how long that takes, and time and memory of its CUDA graphs by stage and mode",
    )
    parser.add_argument("--full", action="store_true", help="also print every setting, the whole plan and the hardware")
    parser.add_argument("--json", action="store_true", help="print all of it as one JSON object")
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Describe and print."""
    config = engine_config(args)
    if args.gpus is None:
        description = args.entry_points.describe(config)
    elif args.start:
        raise ConfigError(
            "--start and --gpus exclude each other",
            got=f"both, --gpus {args.gpus}",
            expected="--start for the GPUs that are here, --gpus for others",
            hint="leave one of them out",
        )
    else:
        description = args.entry_points.describe(config, read_machines(args.gpus))
    if not args.json:
        if args.full:
            print("\n".join(_lines({name: value for name, value in description.items() if name != "fit"})), end="\n\n")
        print("\n".join(fit_lines(description["fit"])), flush=True)  # also if the engine does not start
    if args.start:
        started = _start(args, config, description)
        if not args.json:
            print("\n".join(_lines({"started": started})))
        description["started"] = started
    if args.json:
        print(json.dumps(description, indent=2))
    return 0 if description["fit"]["fits"] or args.start else _DOES_NOT_FIT


def _start(args: argparse.Namespace, config: EngineConfig, description: Mapping[str, Any]) -> dict[str, Any]:
    """Start the engine, end it, and return what its start took; its plan, too, where the cluster made another of it."""
    begun = time.perf_counter()
    with args.entry_points.open_llm(config) as llm:
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
            yield from table_lines(value, indent + "  ")
        else:
            yield f"{indent}{name}: {cell_text(value)}"

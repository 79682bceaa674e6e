"""`raypp info`: whether a model fits, and what an engine would be, without starting it.

Exit codes: 0 it fits; 1 it does not; 2 it can fit no machine: a mistake that the message explains.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from raypp.cli.engine_options import add_engine_options, engine_config
from raypp.config.engine_config import EngineConfig
from raypp.errors import ConfigError
from raypp.plan.fit import counted
from raypp.plan.hardware import read_machines

_DOES_NOT_FIT = 1
_COLUMNS = {
    "weights": "weight_bytes",
    "a step": "step_bytes",
    "graphs": "graph_bytes",
    "libraries": "library_bytes",
    "speculation": "speculation_bytes",
    "images": "item_bytes",
    "states": "state_bytes",
    "KV cache": "kv_cache_bytes",
    "left": "left_bytes",
}
_ALWAYS = ("weight_bytes", "kv_cache_bytes", "left_bytes")
_SMALLEST = 2**30 // 200  # what two decimals show of a GiB


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
        help="plan for GPUs that are not here: 4x80GB; 2x24GB+2x24GB are two machines, 16GB+32GB one",
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
    """Return what each stage's graphs took, a row per stage and mode: none on a CPU by default."""
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


def fit_lines(fit: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of an answer, as `raypp.plan.fit.describe_fit` gives it."""
    types = fit["dtype"] if fit["kv_cache_dtype"] == fit["dtype"] else f"{fit['dtype']}, KV {fit['kv_cache_dtype']}"
    model, num_stages = f"{fit['model']} ({fit['architecture']}, {types})", len(fit["stages"])
    members = "" if fit["num_members"] == 1 else f" of {fit['num_members']} members"
    yield f"{model}, {counted(num_stages, 'stage')}{members} on {_place(fit)}"
    if fit["layers"] is not None:
        yield fit["layers"]
    if fit["has_experts"]:
        held, of_token = fit["whole_experts"], f"{_billions(fit['num_active_parameters'])} for each token"
        whole = "" if held is None else f"; each member has {held} experts of a layer, whole"
        yield f"{_billions(fit['num_parameters'])} parameters, {of_token}{whole}"
    yield ""
    yield from _answer(fit)
    yield ""
    yield from _stage_lines(fit)
    if fit["requests"]:
        yield ""
        yield "requests at once, by their tokens (prompt and output together)"
        yield from table_lines([_request_row(fit, row) for row in fit["requests"]], "  ")
    if fit["alternatives"]:
        yield ""
        yield "what would fit"
        yield from (f"  {_alternative(each)}" for each in fit["alternatives"])
    elif not fit["fits"]:
        yield ""
        yield "No smaller settings fit."
        if "hint" in fit["problem"]:
            yield f"  {fit['problem']['hint']}"
    if fit["layers_by_memory"] is not None:
        yield ""
        yield "what would hold more: layers by memory (by default they are cut so that the slowest stage is fastest)"
        yield f"  {_alternative(fit['layers_by_memory'])}"
    if fit["cuts"] != [cut for cut in fit["cuts"] if cut["is_planned"]]:
        yield ""
        yield from _cut_lines(fit["cuts"])
    yield from _notes(fit)


def _answer(fit: Mapping[str, Any]) -> Iterator[str]:
    if not fit["fits"]:
        problem = fit["problem"]
        yield f"It does not fit: {problem['message']}."
        yield from (f"  {name}: {problem[name]}" for name in ("got", "expected") if name in problem)
        return
    row = _typical(fit["requests"])
    yield (
        f"It fits. KV cache: {fit['num_kv_tokens']:,} tokens: "
        f"{counted(row['num_requests'], 'request')} of {row['num_tokens']:,} tokens."
    )
    longest = fit["max_model_len"]
    if fit["asked_max_model_len"] is None and longest < fit["model_max_len"]:
        yield (
            f"A request may have {longest:,} tokens, for the KV cache holds no more; "
            f"the model takes {fit['model_max_len']:,}."
        )


def _typical(requests: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the row of 8,192 tokens, or the longest below."""
    return [row for row in requests if row["num_tokens"] <= 8192 or row is requests[0]][-1]


def _stage_lines(fit: Mapping[str, Any]) -> Iterator[str]:
    yield f"memory per {'stage' if fit['num_members'] == 1 else 'member of a stage'}, GiB"
    yield from table_lines([_stage_row(fit, stage) for stage in fit["stages"]], "  ")
    if fit["counts_each_gpu"] and fit["fits"]:
        yield f"Stage {fit['fullest_stage']} is the fullest: it sets how many KV blocks all stages have."
    if fit["num_cpu_kv_tokens"]:
        most = _gib(max(stage["cpu_kv_bytes"] for stage in fit["stages"]))
        whole = "" if fit["device"] == "cpu" else ", page-locked"
        kept = f"KV of {fit['num_cpu_kv_tokens']:,} tokens"
        if fit["num_cpu_snapshots"]:
            kept += f" and {counted(fit['num_cpu_snapshots'], 'snapshot')} of states"
        yield f"{kept} that had to make room: in each stage's machine up to {most} GiB of main memory{whole}."
    if fit["num_snapshots"]:
        most = _gib(max(stage["row_bytes"] for stage in fit["stages"]) * fit["num_snapshots"])
        number = counted(fit["num_snapshots"], "snapshot")
        yield f"Of the states, {number} for prompts that begin alike: up to {most} GiB per stage."
    if fit["device"] == "cpu" and fit["fits"]:
        taken = sum(stage["share_bytes"] - stage["left_bytes"] for stage in fit["stages"])
        there = fit["stages"][0]["device_bytes"]
        if there and taken > there:
            yield f"All stages together take {_gib(taken)} GiB, and one such machine has {_gib(there)}: use several."
    if fit["encoders"] is not None:
        number = counted(fit["encoders"]["num_encoders"], "encoder")
        yield f"Besides, {number} for images, each with {_share_of_gpu(fit['encoders'])}."


def _share_of_gpu(encoders: Mapping[str, Any]) -> str:
    share = encoders["resources"].get("GPU")
    return "main memory" if share is None else f"{share:g} GPU ({_gib(encoders['memory_bytes'])} GiB)"


def _stage_row(fit: Mapping[str, Any], stage: Mapping[str, Any]) -> dict[str, Any]:
    first, end = stage["layers"]
    row: dict[str, Any] = {"stage": stage["stage_index"], "layers": f"{first}-{end - 1}"}
    if fit["device"] == "cpu":
        row["machine"] = _gib(stage["device_bytes"])
    else:
        row["GPU"] = _gib(stage["device_bytes"])
        row["may use"] = _gib(stage["share_bytes"])
    for column, name in _COLUMNS.items():
        if name in _ALWAYS or any(other[name] >= _SMALLEST for other in fit["stages"]):
            row[column] = _gib(stage[name])
    return row


def _request_row(fit: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    limit = "KV cache"
    if row["num_requests"] < row["kv_cache_holds"]:
        limit = "states" if fit["max_num_seqs"] < fit["asked_max_num_seqs"] else "max_num_seqs"
    return {"tokens": row["num_tokens"], "requests": row["num_requests"], "limited by": limit}


def _alternative(alternative: Mapping[str, Any]) -> str:
    options = " ".join(_option(name, value) for name, value in alternative["settings"].items())
    missing = alternative["num_missing_gpus"]
    more = f", with {counted(missing, 'more GPU')} like these" if missing else ""
    return f"{options}{more}: {_room(alternative)}"


def _option(name: str, value: object) -> str:
    text = ",".join(map(str, value)) if isinstance(value, list) else "none" if value is None else value
    return f"--{name.replace('_', '-')} {text}"


def _room(summary: Mapping[str, Any]) -> str:
    return (
        f"KV cache {summary['num_kv_tokens']:,} tokens, "
        f"{counted(summary['num_requests'], 'request')} of {summary['num_tokens']:,} tokens"
    )


def _cut_lines(cuts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "stages and members that these GPUs have room for; tokens/s of 1 request, and of all that run at once"
    yield from table_lines([_cut_row(cut) for cut in cuts], "  ")
    for cut in cuts:
        if cut["is_advised"]:
            yield (
                f"raypp would take --num-stages {cut['num_stages']} --tensor-parallel-size "
                f"{cut['tensor_parallel_size']}: most tokens/s of all that run at once,"
            )
            yield "by what each member's GPU reads of weights and KV, and two sums over the members per layer."


def _cut_row(cut: Mapping[str, Any]) -> dict[str, Any]:
    numbers = {"stages": cut["num_stages"], "members": cut["tensor_parallel_size"]}
    if not cut["fits"]:
        return {**numbers, "room": "does not fit"}
    return {**numbers, "room": _room(cut), "of 1": cut["tokens_per_s_of_one"], "of all": cut["tokens_per_s"]}


def _notes(fit: Mapping[str, Any]) -> Iterator[str]:
    yield ""
    if fit["complaint"] is not None:
        yield f"On CPUs: {fit['complaint']}."
    if fit["device"] == "cuda":
        yield "Estimates: CUDA graphs and libraries. `raypp info MODEL --start` measures graphs on the GPUs."
        sizes = {gpu["memory_bytes"] for machine in fit["machines"] or () for gpu in machine["gpus"]}
        if len(sizes) > 1 and not fit["counts_each_gpu"]:
            yield (
                f"GPUs differ: stages that do not take all of them are planned for the smallest, {_gib(min(sizes))} "
                "GiB; CUDA_VISIBLE_DEVICES leaves some out."
            )
        if len(fit["cuts"]) > 1:
            yield "Estimates: tokens/s, of H200 GPUs where their names are not known, with NVLink between members."
        if not all(machine["has_nvlink"] for machine in fit["machines"] or ()):
            yield "Without NVLink sums over members take longer than estimated: 1 member is advised."
    if fit["is_described"]:
        yield "Estimates: the GPUs' memory, 1 GB = 10^9 bytes as --gpus says; a real card has a little more."
    if (fit["num_machines_used"] or 1) > 1:
        yield (
            f"{fit['num_machines_used']} machines: one Ray cluster over them (`ray start`), "
            "RAY_ADDRESS for raypp, and a fast network between stages."
        )
        if fit["edge_bytes_per_token"]:
            yield _network(fit)
    if not fit["is_described"] and fit["machines"] is None:
        yield "RAY_ADDRESS is set: whether the cluster has enough GPUs is seen at the start (--start)."


def _network(fit: Mapping[str, Any]) -> str:
    sent, of_member = fit["edge_bytes_per_token"], fit["slice_bytes_per_token"]
    members = "" if fit["num_members"] == 1 else f", {of_member:,} from each of {fit['num_members']} members"
    carried = f"10 Gb/s carry {1.25e9 / sent:,.0f} tokens/s of prompts"
    return f"A token takes {sent:,} bytes from a stage to the next on another machine{members}: {carried}."


def _place(fit: Mapping[str, Any]) -> str:
    if fit["device"] == "cpu":
        return "CPUs"
    if fit["machines"] is None:
        return f"GPUs of {_gib(fit['stages'][0]['device_bytes'])} GiB"
    groups = [(len(list(same)), machine) for machine, same in groupby(fit["machines"])]
    texts = []
    for number, machine in groups:
        sizes = groupby(gpu["memory_bytes"] for gpu in machine["gpus"])
        gpus = " and ".join(f"{counted(len(list(alike)), 'GPU')} of {_gib(size)} GiB" for size, alike in sizes)
        texts.append(gpus if number == len(groups) == 1 else f"{counted(number, 'machine')} with {gpus}")
    return " and ".join(texts)


def _billions(number: int) -> str:
    return f"{number / 1e9:.1f} billion"


def _gib(num_bytes: int | None) -> str | None:
    return None if num_bytes is None else f"{num_bytes / 2**30:.2f}"


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

"""Free streams beside streams under a grammar, against free streams beside free ones.

    python benchmarks/structured_output.py                       2 stages, 16 streams beside 16
    python benchmarks/structured_output.py --rounds 9 --num-tokens 200
    python benchmarks/structured_output.py --model qwen3-8b --device cuda

Every round runs both: 16 free streams that are watched, beside 16 others that are free, or that follow a grammar. Which
of the two goes first changes from round to round, so that what else happens on the machine hits both. Said are the
watched streams' inter-token latency (over the last three quarters of their tokens: by then all have begun), the same
of the others, and what a grammar costs per token: the difference. On a machine with other work, look at `cpu` instead:
the processor time of each of the engine's processes, and of this one, over the tokens. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from made_tokenizer import with_made_tokenizer
from processor_time import processor_ms
from report import GrowingReport
from workload import model_settings

from raypp import AsyncLLM, SamplingParams

PROMPTS = [f"def {name}(" for name in ("main", "parse", "load", "run")]
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["new", "old", "odd"]}, "maxItems": 3},
    },
    "required": ["name", "count", "tags"],
    "additionalProperties": False,
}
CONSTRAINTS: dict[str, dict[str, Any]] = {
    "json": {"json_schema": {"type": "array", "items": ITEM, "minItems": 100, "maxItems": 100}},
    "regex": {"regex": "([a-z]{3,8} [0-9]{1,3}, ){300}"},
}


async def watch(llm: AsyncLLM, index: int, params: SamplingParams) -> float:
    """Run one stream; return its inter-token latency, ms."""
    first_s = last_s = 0.0
    num_first = num_tokens = 0
    async for output in llm.generate(PROMPTS[index % len(PROMPTS)], params):
        num_tokens, last_s = len(output.outputs[0].token_ids), time.perf_counter()
        if not first_s and num_tokens >= params.max_tokens // 4:  # by then all streams have begun
            first_s, num_first = last_s, num_tokens
    return (last_s - first_s) / (num_tokens - num_first) * 1e3


async def run(llm: AsyncLLM, num_streams: int, num_tokens: int, beside: dict[str, Any] | None) -> tuple[float, float]:
    """Return the mean inter-token latency of the watched free streams and of the others, ms."""

    def params(seed: int, constraint: dict[str, Any] | None) -> SamplingParams:
        free = {"ignore_eos": True} if constraint is None else {"structured_outputs": constraint}
        return SamplingParams(max_tokens=num_tokens, seed=seed, **free)

    watched = [watch(llm, index, params(index, None)) for index in range(num_streams)]
    others = [watch(llm, index, params(100 + index, beside)) for index in range(num_streams)]
    latencies = await asyncio.gather(*watched, *others)
    return statistics.mean(latencies[:num_streams]), statistics.mean(latencies[num_streams:])


async def measure(args: argparse.Namespace, settings: dict[str, Any], report: GrowingReport) -> None:
    """Find all figures. `settings` say which model."""
    llm = await AsyncLLM.create(
        **settings,
        device=args.device,
        num_stages=args.num_stages,
        stage_num_gpus=args.stage_num_gpus,
        max_num_seqs=2 * args.num_streams,
        enable_prefix_caching=False,
    )
    async with llm:
        for name, constraint in ((name, CONSTRAINTS[name]) for name in args.constraints):
            watched: dict[str, list[float]] = {"free": [], "grammar": []}
            others: dict[str, list[float]] = {"free": [], "grammar": []}
            cpu: dict[str, list[dict[str, float]]] = {"free": [], "grammar": []}
            late = 0
            for round_index in range(args.rounds + 1):
                sides: list[tuple[str, dict[str, Any] | None]] = [("free", None), ("grammar", constraint)]
                for side, beside in sides if round_index % 2 else reversed(sides):
                    before = (await llm.stats())["num_late_masks"]
                    cpu_before = processor_ms(llm.processes())
                    of_watched, of_others = await run(llm, args.num_streams, args.num_tokens, beside)
                    if round_index:  # the first round warms up, and compiles the grammar
                        spent, num_tokens = processor_ms(llm.processes()), 2 * args.num_streams * args.num_tokens
                        cpu[side].append({name: (spent[name] - cpu_before[name]) / num_tokens for name in spent})
                        watched[side].append(of_watched)
                        others[side].append(of_others)
                        late += (await llm.stats())["num_late_masks"] - before
            ratios = [a / b for a, b in zip(watched["grammar"], watched["free"], strict=True)]
            figures = {
                "free_beside_free_ms": statistics.median(watched["free"]),
                "free_beside_grammar_ms": statistics.median(watched["grammar"]),
                "free_slowdown": statistics.median(ratios) - 1,
                "free_slowdown_of_rounds": [round(ratio - 1, 3) for ratio in ratios],
                "grammar_ms": statistics.median(others["grammar"]),
                "grammar_cost_ms_per_token": statistics.median(
                    a - b for a, b in zip(others["grammar"], others["free"], strict=True)
                ),
                "cpu_ms_per_token_free": by_process(cpu["free"]),
                "cpu_ms_per_token_grammar": by_process(cpu["grammar"]),
                "late_masks_per_token": late / (args.rounds * args.num_streams * args.num_tokens),
            }
            report.put(name, figures)
            print(name, figures, flush=True)


def by_process(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Return the medians over rounds, and of their sums."""
    medians = {name: statistics.median(of_round[name] for of_round in rounds) for name in rounds[0]}
    medians["all"] = statistics.median(sum(of_round.values()) for of_round in rounds)
    return {name: round(value, 4) for name, value in medians.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="the embedded model is one for CPUs; cuda, auto")
    parser.add_argument("--num-stages", type=int, default=2)
    parser.add_argument("--model", default="tiny", help="a folder of benchmarks/models, or what LLM takes")
    parser.add_argument("--stage-num-gpus", type=float, default=1.0)
    parser.add_argument("--num-streams", type=int, default=16)
    parser.add_argument("--num-tokens", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--constraints", nargs="+", default=list(CONSTRAINTS), choices=CONSTRAINTS)
    parser.add_argument("--out", type=Path, help="write the report there")
    args = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    report = GrowingReport("structured_output", vars(args), args.out)
    settings = model_settings(args.model)
    with tempfile.TemporaryDirectory() as folder:
        if settings.get("load_format") == "dummy":
            settings["model"] = str(with_made_tokenizer(Path(settings["model"]), Path(folder)))
        asyncio.run(measure(args, settings, report))
    report.print()


if __name__ == "__main__":
    main()

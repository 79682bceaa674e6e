"""What a decode step costs beyond the model, over all stages; and on GPUs what each stage's host does for a step.

    python benchmarks/step_overhead.py --num-stages 2
    python benchmarks/step_overhead.py --model qwen3-8b --requests 1 64

Per token, of one request: the time between two results at the driver, less the forwards of all stages in the same step.
What is left is planning, messages, links, sampling and the input batch. The host's work per step is to read the plan,
to queue what is recorded and to hand the result on: at most 150 us on the last stage, 80 us on the others, is the aim.
On a CPU the host computes, too, and waits for the stage before, so that there it would say nothing. Medians over the
last steps of a trace, which `--trace` keeps. The last line is JSON.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from report import print_report, resolved_config
from workload import model_settings, random_prompts, seconds_for

from raypp import LLM
from raypp.tracing import DRIVER_LANE, FORWARD, HOST, Lane, now_ns, read_chrome_trace

_PROMPT_LEN, _FIRST_STEPS = 16, 50
_HOST_AIM_US = {True: 150.0, False: 80.0}  # whether it is the last stage


def per_token(stages: Sequence[Lane], num_steps: int) -> dict[str, float]:
    """Return what a token took, and how much of it the stages computed, ms. Of a run with one request."""
    forwards = [{event.step_id: event for event in lane.events if event.name == FORWARD} for lane in stages]
    ended = {event.step_id: event.end_ns for event in stages[-1].events if event.name in ("sample", FORWARD)}
    steps = sorted(ended)[-num_steps:]
    token_ms, overhead_ms, forward_ms = [], [], []
    for before, step in pairwise(steps):
        token_ms.append((ended[step] - ended[before]) / 1e6)
        forward_ms.append(sum((lane[step].end_ns - lane[step].start_ns) / 1e6 for lane in forwards))
        overhead_ms.append(token_ms[-1] - forward_ms[-1])
    return {
        "per_token_ms": statistics.median(token_ms),
        "forward_ms": statistics.median(forward_ms),
        "overhead_ms": statistics.median(overhead_ms),
        "overhead_p99_ms": statistics.quantiles(overhead_ms, n=100)[98],
        "num_steps": len(overhead_ms),
    }


def host_us(stages: Sequence[Lane], num_steps: int) -> list[dict[str, float]]:
    """Return for every stage how long its host worked for a step, over the last steps."""
    found = []
    for lane in stages:
        times = [(event.end_ns - event.start_ns) / 1e3 for event in lane.events if event.name == HOST][-num_steps:]
        found.append({"median_us": statistics.median(times), "p99_us": statistics.quantiles(times, n=100)[98]})
    return found


def within(lanes: Sequence[Lane], begun_ns: int, ended_ns: int) -> list[Lane]:
    """Return the stages' lanes with what happened in a stretch of time."""
    return [
        Lane(lane.name, [event for event in lane.events if begun_ns <= event.start_ns <= ended_ns])
        for lane in lanes
        if lane.name != DRIVER_LANE
    ]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="a folder of benchmarks/models, or what LLM takes")
    parser.add_argument("--num-stages", type=int, default=2)
    parser.add_argument("--requests", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--trace", type=Path, help="where to keep the trace")
    args = parser.parse_args()

    num_tokens = args.steps + _FIRST_STEPS
    windows: dict[int, tuple[int, int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = args.trace or Path(folder) / "trace.json"
        with LLM(
            **model_settings(args.model),
            num_stages=args.num_stages,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_num_seqs=max(args.num_stages, *args.requests),
            max_model_len=_PROMPT_LEN + num_tokens,
            trace=str(path),
        ) as llm:
            config, vocab_size, rng = resolved_config(llm), llm.plan()["vocab_size"], random.Random(0)
            for num_requests in args.requests:
                prompts = random_prompts(num_requests, _PROMPT_LEN, vocab_size, rng)
                begun_ns = now_ns()
                seconds_for(llm, prompts, num_tokens)
                windows[num_requests] = (begun_ns, now_ns())
        lanes = read_chrome_trace(path)

    figures: dict[str, Any] = {}
    is_on_gpus = config["parallel"]["device"] == "cuda"
    for num_requests, window in windows.items():
        stages, of_point = within(lanes, *window), {}
        if num_requests == 1:
            of_point |= per_token(stages, args.steps)
            print("1 request: " + ", ".join(f"{name} {value:.3f}" for name, value in of_point.items()))
        if is_on_gpus:
            of_point["host"] = host_us(stages, args.steps)
            for index, host in enumerate(of_point["host"]):
                aim_us = _HOST_AIM_US[index == len(stages) - 1]
                verdict = "ok" if host["median_us"] <= aim_us else "MISSED"
                print(
                    f"{num_requests} requests, stage {index}: host {host['median_us']:.0f} us per step, "
                    f"99 of 100 below {host['p99_us']:.0f} us; at most {aim_us:.0f}: {verdict}"
                )
        figures[f"{num_requests} requests"] = of_point
    print_report("step_overhead", vars(args), figures, config)


if __name__ == "__main__":
    main()

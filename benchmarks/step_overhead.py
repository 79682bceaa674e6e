"""What a decode step costs beyond the model: batch 1, greedy, over all stages.

    python benchmarks/step_overhead.py --num-stages 2

Per token: the time between two results at the driver, less the forwards of all stages in the same step. What is
left is planning, messages, links, sampling and the input batch. Read from a trace of one request; the median over the
last steps is printed.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path

from report import print_report

from raypp import LLM, SamplingParams
from raypp.tracing import DRIVER_LANE, FORWARD, read_chrome_trace


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--num-stages", type=int, default=2)
    parser.add_argument("--steps", type=int, default=500)
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with LLM(args.model, num_stages=args.num_stages, trace=str(path)) as llm:
            params = SamplingParams(max_tokens=args.steps + 50, temperature=0.0, ignore_eos=True)
            llm.generate([{"prompt_token_ids": [5, 6, 7, 8]}], params)
        lanes = [lane for lane in read_chrome_trace(path) if lane.name != DRIVER_LANE]

    forwards = [{e.step_id: e for e in lane.events if e.name == FORWARD} for lane in lanes]
    samples = {e.step_id: e for e in lanes[-1].events if e.name == "sample"}
    steps = sorted(samples)[-args.steps :]
    per_token_ms, overhead_ms, forward_ms = [], [], []
    for before, step in pairwise(steps):
        token = (samples[step].end_ns - samples[before].end_ns) / 1e6
        forward = sum((lane[step].end_ns - lane[step].start_ns) / 1e6 for lane in forwards)
        per_token_ms.append(token)
        forward_ms.append(forward)
        overhead_ms.append(token - forward)
    figures = {
        "per_token_ms": statistics.median(per_token_ms),
        "forward_ms": statistics.median(forward_ms),
        "overhead_ms": statistics.median(overhead_ms),
        "overhead_p99_ms": statistics.quantiles(overhead_ms, n=100)[98],
        "num_steps": len(overhead_ms),
    }
    for name, value in figures.items():
        print(f"{name}: {value:.3f}")
    print_report("step_overhead", vars(args), figures)


if __name__ == "__main__":
    main()

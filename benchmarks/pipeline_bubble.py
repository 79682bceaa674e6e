"""How much of the stages' time is bubble when every stage takes the same fixed time: what the pipeline itself costs.

    python benchmarks/pipeline_bubble.py --num-stages 4 --step-ms 5 --steps 200

Runs `FakeStage` on real actors, links and channels, once with a cohort per stage and once with a single one, and prints
the bubble fraction of each run, fill and drain excluded, with the median.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from report import print_report, resolved_config

from raypp import LLM, SamplingParams, bubble_fraction
from raypp.testing import FakeStage


def measure(num_stages: int, num_requests: int, num_steps: int, step_ms: float) -> tuple[float, dict[str, Any]]:
    """Return the bubble fraction of one run, and the engine's configuration."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "trace.json")
        factory = FakeStage(step_ms=step_ms)
        with LLM(
            "tiny", num_stages=num_stages, max_num_seqs=num_stages, device="cpu", stage_factory=factory, trace=path
        ) as llm:
            config = resolved_config(llm)
            params = SamplingParams(max_tokens=num_steps // num_requests, temperature=0.0, ignore_eos=True)
            llm.generate([{"prompt_token_ids": [100 * (1 + i)]} for i in range(num_requests)], params)
        return bubble_fraction(path), config


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-stages", type=int, default=4)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    figures = {}
    for num_cohorts in (args.num_stages, 1):
        measured = [measure(args.num_stages, num_cohorts, args.steps, args.step_ms) for _ in range(args.runs)]
        runs, config = [fraction for fraction, _ in measured], measured[0][1]
        figures[f"{num_cohorts} cohorts"] = {"median": statistics.median(runs), "best": min(runs), "runs": runs}
        print(f"{num_cohorts} cohorts: bubble {statistics.median(runs):.3f}, best {min(runs):.3f}", flush=True)
    print_report("pipeline_bubble", vars(args), figures, config)


if __name__ == "__main__":
    main()

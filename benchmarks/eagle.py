"""What an EAGLE-3 head costs and brings on GPUs: forced acceptance, so that random weights will do.

    python benchmarks/eagle.py --num-stages 2 --requests 1 16 64

Three engines one after the other, all with prompts of random ids, greedy, EOS ignored:

    off      no drafts
    verify   K drafts per step from n-grams, which cost next to nothing, accepted at the forced rate
    eagle    K drafts per step from the head, accepted at the same rate

Drafting costs per step what `eagle` takes longer than `verify`, both while all requests decode (`decode_point.py`).
What the device takes per step and stage, drafting included, is told beside. The last line is JSON.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from decode_point import DecodePoint, measure_point
from report import GrowingReport, resolved_config
from workload import model_settings, random_prompts, seconds_for

from raypp import LLM
from raypp.tracing import read_chrome_trace

MAX_SHARE, MIN_SPEEDUP = 0.12, 2.0
WARM_UP_TOKENS = 32


def engines(head: str, weights: str, num_drafts: int, rate: float) -> dict[str, dict[str, Any] | None]:
    """Return the settings of speculation by the engine's name."""
    common = {"num_speculative_tokens": num_drafts, "forced_acceptance_rate": rate}
    return {
        "off": None,
        "verify": {"method": "ngram", "ngram_window": 4096, **common},
        "eagle": {"method": "eagle3", "model": head, "head_weights": weights, "ngram_window": 4096, **common},
    }


def measure(settings: dict[str, Any], args: argparse.Namespace, report: GrowingReport) -> dict[int, dict[str, Any]]:
    """Return, per number of requests, time per output token, tokens per row and step, and the time of a step."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        points = _points({**settings, "trace": str(trace)}, args, report)
        lanes = read_chrome_trace(trace)
    figures = {}
    for point in points:
        point.note_trace(lanes)
        if point.tpot_ms is None:
            raise SystemExit(f"{point.num_requests} requests never decode all at once: more tokens each are needed")
        figures[point.num_requests] = point.figures()
        forwards = [round(stage.get("forward_us", 0) / 1e3, 3) for stage in point.stages]
        print(
            f"   {point.num_requests:4d} requests: {point.tpot_ms:.3f} ms per token, of the slowest request "
            f"{point.itl_ms:.3f}; {statistics.fmean(point.tokens_per_step):.2f} tokens per step of {point.step_ms:.3f} "
            f"ms; per stage {forwards} ms",
            flush=True,
        )
    return figures


def _points(settings: dict[str, Any], args: argparse.Namespace, report: GrowingReport) -> list[DecodePoint]:
    begun = time.perf_counter()
    with LLM(**settings) as llm:
        report.note_config(resolved_config(llm))
        stages = llm.plan()["stages"]
        recordings = [stage["graphs"] for stage in llm.stats()["stages"]]
        print(
            f"   ready in {time.perf_counter() - begun:.1f} s, layers {[stage['num_layers'] for stage in stages]}, "
            f"head {stages[-1]['draft_head_bytes'] / 2**20:.0f} MiB of type {llm.plan()['draft_head_weights']}, "
            f"recordings {recordings}",
            flush=True,
        )
        warm_up = random_prompts(max(args.requests), args.input_len, llm.plan()["vocab_size"], random.Random(-1))
        seconds_for(llm, warm_up, WARM_UP_TOKENS)
        return [measure_point(llm, count, args.input_len, args.output_len, args.runs) for count in args.requests]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-8b", help="a folder of benchmarks/models, or what LLM takes")
    parser.add_argument("--head", default=str(Path(__file__).parent / "models" / "qwen3-8b-eagle3"))
    parser.add_argument("--head-weights", default="auto", choices=("auto", "model", "fp8"))
    parser.add_argument("--num-stages", type=int, default=2)
    parser.add_argument("--num-drafts", type=int, default=4)
    parser.add_argument("--rate", type=float, default=0.7, help="acceptance of a draft, given those before it")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--mode", default="full", help="graphs")
    parser.add_argument("--out", type=Path, help="write the report there")
    args = parser.parse_args()
    figures: dict[str, dict[int, dict[str, Any]]] = {}
    report = GrowingReport("eagle", vars(args), args.out)
    for name, speculative in engines(args.head, args.head_weights, args.num_drafts, args.rate).items():
        print(name, flush=True)
        settings = model_settings(args.model) | {
            "num_stages": args.num_stages,
            "skip_tokenizer_init": True,
            "enable_prefix_caching": False,
            "max_num_seqs": max(args.requests),
            "max_model_len": 2048,
            "max_num_batched_tokens": 4096,
            "mode": args.mode,
            "speculative": speculative,
        }
        figures[name] = measure({key: value for key, value in settings.items() if value is not None}, args, report)
        report.put(name, figures[name])
    print("requests  step off  verify   eagle  drafting   share  speedup")
    verdicts = {}
    for count in args.requests:
        off, verify, eagle = (figures[name][count] for name in ("off", "verify", "eagle"))
        drafting = eagle["step_ms"] - verify["step_ms"]
        share, speedup = drafting / eagle["step_ms"], off["tpot_ms"] / eagle["tpot_ms"]
        verdicts[count] = {"drafting_ms": drafting, "share": share, "speedup": speedup}
        print(
            f"{count:8d}  {off['step_ms']:8.3f} {verify['step_ms']:7.3f} {eagle['step_ms']:7.3f} {drafting:9.3f} "
            f"{share:7.1%} {speedup:7.2f}x  (share at most {MAX_SHARE:.0%}, speedup at least {MIN_SPEEDUP:g}x)"
        )
    report.put("verdicts", verdicts)
    report.print()


if __name__ == "__main__":
    main()

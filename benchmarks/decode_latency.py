"""Decode latency of one engine at several numbers of requests, as offline benchmarks measure it.

    python benchmarks/decode_latency.py --model qwen3-8b --num-stages 2 --requests 1 16 64 256

All requests come at once, with random prompts of exactly `--input-len` tokens, EOS ignored, prefix caching off. Ways of
sampling (`--sampling`) take turns.
ITL = (time for `--output-len` tokens - time for 1) / (output-len - 1); the median of `--runs`. With `--trace`, what
device and host take per decode step and stage. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from typing import Any

from decode_point import engine_settings, measure_points
from report import print_report, resolved_config
from workload import SAMPLING, random_prompts, seconds_for

from raypp import LLM
from raypp.tracing import read_chrome_trace

_WARM_UP_TOKENS = 8


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="a folder of benchmarks/models, or what LLM takes")
    parser.add_argument("--num-stages", type=int, default=2)
    parser.add_argument("--stage-num-gpus", type=float, default=1.0, help="0.5: two stages on one GPU")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--load-format", choices=("auto", "dummy"))
    kinds = (*SAMPLING, "mix")
    parser.add_argument("--sampling", nargs="+", default=["greedy"], choices=kinds, help="how requests sample")
    parser.add_argument("--mode", default="auto", help="of graphs")
    parser.add_argument("--compile", action="store_true", help="graphs.compile: the layers through torch.compile")
    parser.add_argument("--layer-partition", type=int, nargs="+")
    parser.add_argument("--speculative", type=json.loads, help='settings, e.g. {"method": "ngram"}')
    parser.add_argument("--settings", type=json.loads, default={}, help='others, e.g. {"kv_cache_dtype": "fp8"}')
    parser.add_argument("--trace", help="write a Chrome trace, and print what device and host take per decode step")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    args = parser.parse_args()
    settings: dict[str, Any] = {
        **engine_settings(args.model, args),
        **({"load_format": args.load_format} if args.load_format else {}),
        "layer_partition": args.layer_partition,
        "mode": args.mode,
        "compile": args.compile,
        "speculative": args.speculative,
        "trace": args.trace,
        **args.settings,
    }
    started, points = time.perf_counter(), []
    with LLM(**settings) as llm:
        figures: dict[str, Any] = {"start_s": time.perf_counter() - started, "plan": llm.plan()}
        config, vocab_size = resolved_config(llm), llm.plan()["vocab_size"]
        print(f"ready after {figures['start_s']:.1f} s", flush=True)
        figures["recordings"] = [stage["graphs"] for stage in llm.stats()["stages"]]
        for index, recordings in enumerate(figures["recordings"]):
            print(f"stage {index}: {recordings}", flush=True)
        for num_requests in args.requests:
            prompts = random_prompts(num_requests, args.input_len, vocab_size, random.Random(-1))
            for sampling in args.sampling:
                seconds_for(llm, prompts, _WARM_UP_TOKENS, sampling)
            measured = measure_points(llm, num_requests, args.input_len, args.output_len, args.runs, args.sampling)
            for sampling, point in zip(args.sampling, measured, strict=True):
                points.append((sampling, point))
                print(
                    f"{num_requests:4d} requests, {sampling}: ITL {point.itl_ms:.3f} ms, first token "
                    f"{point.first_token_s * 1e3:.1f} ms, {point.tokens_per_s:.0f} tok/s",
                    flush=True,
                )
        figures["num_unrecorded"] = [stage["num_unrecorded"] for stage in llm.stats()["stages"]]
        print(f"steps without a recording: {figures['num_unrecorded']}", flush=True)
    lanes = read_chrome_trace(args.trace) if args.trace else []
    for sampling, point in points:
        point.note_trace(lanes)
        figures[f"{point.num_requests} requests" + f", {sampling}" * (sampling != "greedy")] = point.figures()
        if args.trace:
            print(f"{point.num_requests:4d} requests, per step and stage: {point.stages}")
    print_report("decode_latency", vars(args), figures, config)


if __name__ == "__main__":
    main()

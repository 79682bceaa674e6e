"""Decode latency of an engine at several numbers of requests, as offline benchmarks measure it.

    python benchmarks/decode_latency.py --model DIR --num-stages 2 --requests 1 16 64 256

All requests come at once, with random prompts of exactly `--input-len` tokens, greedy, EOS ignored, prefix caching off.
ITL = (time for `--output-len` tokens - time for 1) / (output-len - 1); the median of `--runs`. The last line is a JSON
document with commit, versions, hardware and settings.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

from report import print_report

from raypp import LLM, SamplingParams
from raypp.tracing import read_chrome_trace


def _stage_figures(path: str) -> dict[str, dict[str, float]]:
    """Return medians over the decode steps of each stage: the device's forward, and the host's work for it."""
    figures = {}
    for lane in read_chrome_trace(path):
        spans = {
            name: [event.end_ns - event.start_ns for event in lane.events if event.name == name]
            for name in ("forward", "host")
        }
        figures[lane.name] = {f"{name}_us": statistics.median(times) / 1e3 for name, times in spans.items() if times}
    return figures


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--num-stages", type=int, default=2)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--mode", default="auto", help="graphs: auto, full or none")
    parser.add_argument("--layer-partition", type=int, nargs="+")
    parser.add_argument("--speculative", type=json.loads, help='settings, e.g. {"method": "ngram"}')
    parser.add_argument("--trace", help="write a Chrome trace, and print what the host takes per decode step")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    args = parser.parse_args()
    started = time.perf_counter()
    with LLM(
        args.model,
        num_stages=args.num_stages,
        load_format=args.load_format,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_num_seqs=max(args.requests),
        max_model_len=args.max_model_len,
        max_num_batched_tokens=args.max_num_batched_tokens,
        layer_partition=args.layer_partition,
        mode=args.mode,
        speculative=args.speculative,
        trace=args.trace,
    ) as llm:
        figures: dict[str, object] = {"start_s": time.perf_counter() - started, "plan": llm.plan()}
        print(f"ready after {figures['start_s']:.1f} s", flush=True)
        vocab_size = llm.plan()["vocab_size"]
        generator = random.Random(0)

        def run(num_requests: int, num_tokens: int) -> float:
            prompts = [
                {"prompt_token_ids": [generator.randrange(vocab_size) for _ in range(args.input_len)]}
                for _ in range(num_requests)
            ]
            params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
            begun = time.perf_counter()
            outputs = llm.generate(prompts, params)
            elapsed_s = time.perf_counter() - begun
            assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs)
            return elapsed_s

        for num_requests in args.requests:
            run(num_requests, 8)  # warm-up
            firsts = [run(num_requests, 1) for _ in range(args.runs)]
            wholes = [run(num_requests, args.output_len) for _ in range(args.runs)]
            first_s, whole_s = statistics.median(firsts), statistics.median(wholes)
            itl_ms = (whole_s - first_s) / (args.output_len - 1) * 1e3
            tokens_per_s = num_requests * args.output_len / whole_s
            figures[f"{num_requests} requests"] = {
                "itl_ms": itl_ms,
                "first_token_ms": first_s * 1e3,
                "tokens_per_s": tokens_per_s,
                "runs_s": wholes,
            }
            print(
                f"{num_requests:4d} requests: ITL {itl_ms:.3f} ms, first token {first_s * 1e3:.1f} ms, "
                f"{tokens_per_s:.0f} tok/s",
                flush=True,
            )
    if args.trace:
        figures["stages"] = _stage_figures(args.trace)
        print(figures["stages"], flush=True)
    print_report("decode_latency", vars(args), figures)


if __name__ == "__main__":
    main()

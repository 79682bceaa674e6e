"""A picture of what the stages did, the bubble, and how near each stage came to what its device can do at all.

    python benchmarks/pipeline_timeline.py --out timeline.json --pictures docs/images
    python benchmarks/pipeline_timeline.py --from timeline.json --pictures docs/images

decode    64 requests at once; their decode steps, when all of them run
prompt    one long prompt, whose chunks follow each other through the stages

The limit of a forward is what reading its weights and KV takes at the speed that the device reads memory, or its
arithmetic at the speed that it multiplies matrices, if that is more; both are measured first. Pictures need matplotlib:
where there is none, `--from` draws them elsewhere. The last line is JSON, or with `--out` that file.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import traceback
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from device_speed import measure_device_speed
from report import GrowingReport, resolved_config
from stage_limit import StageLimit, forward_work, stage_limits
from workload import model_settings, random_prompts, seconds_for

from raypp import LLM
from raypp.actors.cluster import Cluster
from raypp.api.timeline import Forward, MemorySpeed, Timeline
from raypp.errors import ConfigError
from raypp.models.config import load_model_config
from raypp.models.registry import resolve_model_path
from raypp.models.sizes import WeightReads

_WARM_UP_TOKENS = 8


def record(args: argparse.Namespace, scenario: str, report: GrowingReport) -> None:
    """Run one scenario, print its figures and keep them."""
    model = model_settings(args.model)
    prompt_settings = {"max_num_seqs": args.num_stages, "max_model_len": args.prompt_len + 1, "mode": args.prompt_mode}
    decode_settings = {"max_num_seqs": args.requests, "max_model_len": args.input_len + args.output_len}
    settings = decode_settings if scenario == "decode" else prompt_settings
    num_requests, length, num_tokens = (
        (args.requests, args.input_len, args.output_len) if scenario == "decode" else (1, args.prompt_len, 1)
    )
    with LLM(
        **model,
        num_stages=args.num_stages,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        trace=None if args.trace is None else str(args.trace.with_suffix(f".{scenario}.json")),
        **settings,
    ) as llm:
        plan, rng = llm.plan(), random.Random(0)
        report.note_config(resolved_config(llm))
        for count in (min(_WARM_UP_TOKENS, num_tokens), num_tokens):
            seconds = seconds_for(llm, random_prompts(num_requests, length, plan["vocab_size"], rng), count)
            timeline = llm.timeline()
    speed = measure_device_speed(plan["device"], plan["dtype"])
    timeline = replace(timeline, memory_speed=MemorySpeed(speed.read_bytes_per_s, "measured"))
    if scenario == "decode":
        timeline = replace(timeline, forwards=full_decode_steps(timeline.forwards))
    shapes = load_model_config(Path(resolve_model_path(model["model"])))
    figures = {
        "seconds": seconds,
        "device_speed": asdict(speed),
        "bubble_fraction": timeline.bubble_fraction,
        "stages": stage_figures(timeline, stage_limits(shapes, plan, speed)),
        "timeline": {**asdict(timeline), "forwards": [list(forward) for forward in timeline.forwards]},
    }
    print(f"{scenario}: {timeline}")
    for index, stage in enumerate(figures["stages"]):
        print(
            f"  stage {index}: {stage['num_forwards']} forwards of {stage['forward_ms']:.3f} ms, "
            f"{stage['share_while_computing']:.1%} of the limit while computing, {stage['share_of_time']:.1%} in all"
        )
    report.put(scenario, figures)


def full_decode_steps(forwards: Sequence[Forward]) -> list[Forward]:
    """Return the forwards of steps that only decode, with as many rows as their cohort ever has."""
    decoding = [forward for forward in forwards if forward.num_tokens == forward.num_rows]
    most = {cohort: max(f.num_rows for f in decoding if f.cohort == cohort) for cohort in {f.cohort for f in decoding}}
    return [forward for forward in decoding if forward.num_rows == most[forward.cohort]]


def stage_figures(timeline: Timeline, limits: Sequence[StageLimit]) -> list[dict[str, float]]:
    """Return for each stage how long its forwards took, and the shares of the limit: while it computed, and in all."""
    opens_us, closes_us = timeline.window_us
    found = []
    for index, limit in enumerate(limits):
        forwards = sorted(
            (forward for forward in timeline.forwards if forward.stage_index == index), key=lambda f: f.step_id
        )
        limits_s = [limit.seconds(forward_work(forward)) for forward in forwards]
        times_s = [(forward.end_us - forward.start_us) / 1e6 for forward in forwards]
        inside_s = sum(
            least_s
            for least_s, forward in zip(limits_s, forwards, strict=True)
            if opens_us <= forward.start_us and forward.end_us <= closes_us
        )
        found.append(
            {
                "num_forwards": len(forwards),
                "forward_ms": statistics.median(times_s) * 1e3,
                "limit_ms": statistics.median(limits_s) * 1e3,
                "share_while_computing": sum(limits_s) / sum(times_s),
                "share_of_time": inside_s / ((closes_us - opens_us) / 1e6),
            }
        )
    return found


def draw(scenario: str, figures: dict[str, Any], folder: Path, picture_ms: float) -> None:
    """Write the picture: of a decode run `picture_ms` from its middle, of a prompt everything."""
    saved = figures["timeline"]
    timeline = Timeline(
        [Forward.of_span(forward) for forward in saved["forwards"]],
        saved["num_stages"],
        [WeightReads(**reads) for reads in saved["step_reads"]],
        MemorySpeed(**saved["memory_speed"]),
    )
    if scenario == "decode":
        middle_us = sum(timeline.window_us) // 2
        half_us = picture_ms * 500
        shown = [f for f in timeline.forwards if abs(f.start_us - middle_us) <= half_us]
        timeline = replace(timeline, forwards=shown)
    else:
        timeline = replace(timeline, memory_speed=None)  # arithmetic bounds a prompt
    path = folder / f"timeline-{scenario}.png"
    try:
        timeline.save(path)
    except ConfigError as error:
        print(f"no picture of {scenario}: {error}")
    else:
        print(f"wrote {path}")


def main() -> None:
    """Run and print, or draw what another run has found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-8b", help="a folder of benchmarks/models, or what LLM takes")
    parser.add_argument("--num-stages", type=int, default=2)
    parser.add_argument("--scenarios", nargs="+", choices=("decode", "prompt"), default=["decode", "prompt"])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--prompt-len", type=int, default=32768)
    parser.add_argument("--prompt-mode", default="none", help="of graphs, for the long prompt")
    parser.add_argument("--picture-ms", type=float, default=40.0, help="of the decode steps")
    parser.add_argument("--pictures", type=Path, help="folder that timeline-*.png are written to")
    parser.add_argument("--trace", type=Path, help="write Chrome traces too, named after this file")
    parser.add_argument("--out", type=Path, help="a JSON file, written after every scenario")
    parser.add_argument("--from", dest="source", type=Path, help="draw what such a file holds, and run nothing")
    args = parser.parse_args()

    if args.source is not None:
        found = json.loads(args.source.read_text())["figures"]
    else:
        report = GrowingReport("pipeline_timeline", vars(args), args.out)
        cluster = Cluster.connect()
        try:
            for scenario in args.scenarios:
                try:
                    record(args, scenario, report)
                except Exception as error:  # one scenario must not stop the other, nor the pictures
                    traceback.print_exc()
                    report.put(scenario, {"error": f"{type(error).__name__}: {error}"})
        finally:
            cluster.disconnect()
        found = report.figures
    if args.pictures is not None:
        args.pictures.mkdir(parents=True, exist_ok=True)
        for scenario, figures in found.items():
            if "timeline" in figures:
                draw(scenario, figures, args.pictures, args.picture_ms)
    if args.source is None:
        report.print()


if __name__ == "__main__":
    main()

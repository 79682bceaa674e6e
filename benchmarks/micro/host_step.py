"""What the hosts do for a decode step, without a GPU: stages whose device does nothing, and the driver's scheduler.

    python benchmarks/micro/host_step.py --requests 1 16 64 256
    python benchmarks/micro/host_step.py --requests 16 --profile 1          where stage 1's time goes

Per stage and step: the thread's own CPU time, the median, and how often the device is called. The driver's time is that
of its scheduler with the bytes of plans and results; sockets and threads are in none of it. What a call takes on a GPU
is not seen here: with `--call-us`, so many microseconds each for a replay, a flag, a kernel or copy and a view, an
estimate is printed beside the count. The last line is JSON.
"""

from __future__ import annotations

import argparse
import cProfile
import math
import pstats
import statistics
import sys
import time
from collections import Counter, defaultdict
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from idle_stages import DeviceCalls, build_idle_stages
from report import print_report

from raypp.config.engine_config import EngineConfig
from raypp.driver.engine_loop import Engine
from raypp.driver.grammars import Grammars
from raypp.messages import MaskUpdate, StepPlan, StepResult, pack, unpack
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.request import Request
from raypp.scheduler.scheduler import Scheduler
from raypp.stage.stage import Stage
from raypp.testing.local_engine import InlineGrammars
from raypp.tracing import Tracer
from raypp.types import SamplingParams

_PROMPT_LEN, _FIRST_STEPS = 16, 60
_CALLS = ("replays", "flags", "kernels", "views")


class TimedPipeline:
    """Runs plans in the calling thread, and notes what everybody takes for a step."""

    def __init__(self, stages: list[Stage], calls: DeviceCalls) -> None:
        self._stages = stages
        self._calls = calls
        self._submitted: list[bytes] = []
        self.times_us: dict[str, list[float]] = defaultdict(list)
        self.counts: list[Counter[str]] = [Counter() for _ in stages]
        self.profiles: dict[int, cProfile.Profile] = {}
        self.is_noting = self.is_counting = False
        self.elsewhere_s = 0.0  # since the driver began its step

    def submit(self, plan: StepPlan) -> None:
        self._submitted.append(pack(plan))

    def send_masks(self, update: MaskUpdate) -> None:
        raise NotImplementedError("nobody has a grammar")

    def collect(self) -> list[StepResult]:
        if not self._submitted:
            return []
        begun_s = time.thread_time()
        data, packed = self._submitted.pop(0), b""
        with torch.inference_mode():
            for index, stage in enumerate(self._stages):
                packed = self._step(index, stage, data)
        self.elsewhere_s += time.thread_time() - begun_s
        return [unpack(StepResult, packed)]

    def close(self) -> None:
        self._submitted.clear()

    def _step(self, index: int, stage: Stage, data: bytes) -> bytes:
        moments = [time.thread_time_ns()]
        plan = unpack(StepPlan, data)
        stage.announce(plan)
        moments.append(time.thread_time_ns())
        before = Counter(self._calls.counts)
        with self._calls if self.is_counting else self.profiles.get(index, nullcontext()):
            result = stage.step(plan)
        moments.append(time.thread_time_ns())
        self.counts[index] += self._calls.counts - before if self.is_counting else Counter()
        packed = b"" if result is None else pack(result.wait())
        moments.append(time.thread_time_ns())
        if self.is_noting:
            for name, begun, ended in zip(("read", "step", "answer"), moments, moments[1:], strict=False):
                self.times_us[f"stage {index} {name}"].append((ended - begun) / 1e3)
        return packed


def measure(num_requests: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return medians by who and what, and calls per step and stage."""
    num_tokens = _FIRST_STEPS + args.steps + args.counted
    config = EngineConfig.from_flat(
        "tiny",
        num_stages=args.num_stages,
        mode="full",
        max_num_seqs=max(num_requests, args.num_stages),
        max_num_batched_tokens=max(512, 2 * num_requests),
        max_model_len=_PROMPT_LEN + 2 * num_tokens,
        num_kv_blocks=4 + num_requests * (2 + (_PROMPT_LEN + 2 * num_tokens) // 16),
        enable_prefix_caching=False,
        **({"speculative": {"method": "ngram", "num_speculative_tokens": args.drafts}} if args.drafts else {}),
    )
    plan, calls = plan_engine(config, Hardware(2)), DeviceCalls()
    pipeline = TimedPipeline(build_idle_stages(plan, calls), calls)
    scheduler = Scheduler(plan.scheduler_limits(), plan.draft_policy())
    grammars = Grammars(InlineGrammars(plan.vocabulary_source()), math.inf, pipeline.send_masks)
    engine = Engine(scheduler, pipeline, Tracer("driver", enabled=False), None, grammars)
    for index in range(num_requests):
        params = SamplingParams(max_tokens=2 * num_tokens, temperature=args.temperature, ignore_eos=True)
        engine.add(Request(f"request {index}", np.full(_PROMPT_LEN, 5 + index % 7, np.int32), params, seed=index))
    for _ in range(_FIRST_STEPS):
        engine.step()
    pipeline.is_noting = True
    for _ in range(args.steps):
        pipeline.elsewhere_s, begun_s = 0.0, time.thread_time()
        engine.step()
        pipeline.times_us["driver"].append((time.thread_time() - begun_s - pipeline.elsewhere_s) * 1e6)
    pipeline.is_noting, pipeline.is_counting = False, True
    for _ in range(args.counted):
        engine.step()
    pipeline.is_counting = False
    if args.profile is not None:
        pipeline.profiles[args.profile] = cProfile.Profile()
        for _ in range(args.counted):
            engine.step()
        pstats.Stats(pipeline.profiles[args.profile]).sort_stats("tottime").print_stats(25)
    return {
        "times_us": {name: round(statistics.median(times), 1) for name, times in pipeline.times_us.items()},
        "calls": [{name: round(count / args.counted, 2) for name, count in of.items()} for of in pipeline.counts],
    }


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--num-stages", type=int, default=2)
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=400, help="that are timed")
    parser.add_argument("--counted", type=int, default=100, help="further ones whose calls are counted")
    parser.add_argument("--profile", type=int, help="print a profile of this stage's steps")
    parser.add_argument(
        "--call-us",
        type=float,
        nargs=4,
        default=[12.0, 8.0, 28.0, 9.0],
        metavar="US",
        help="as within a step on an H200 (benchmarks/REPORT.md); a view as after a sleep",
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    for num_requests in args.requests:
        found = figures[f"{num_requests} requests"] = measure(num_requests, args)
        print(f"{num_requests} requests:", ", ".join(f"{name} {us:.0f} us" for name, us in found["times_us"].items()))
        for index, calls in enumerate(found["calls"]):
            device_us = sum(calls.get(name, 0) * us for name, us in zip(_CALLS, args.call_us, strict=True))
            print(f"    stage {index}: {calls}, by --call-us {device_us:.0f} us")
    print_report("host_step", vars(args), figures)


if __name__ == "__main__":
    main()

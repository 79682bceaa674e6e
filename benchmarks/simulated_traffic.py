"""What traffic would take on GPUs: the real scheduler, on a simulated clock, with stages that take what is estimated.

    python benchmarks/simulated_traffic.py --model qwen3-8b --layers 19 17 --traffic offline online-16 online-40
    python benchmarks/simulated_traffic.py --limits '{"max_num_batched_tokens": 2048}' '{"max_num_seqs": 128}'
    python benchmarks/simulated_traffic.py --steps steps.json
    python benchmarks/simulated_traffic.py --traffic online-40 --prompts-ms 7 --seed 1

For the scheduler's choices, which need no GPU to be compared: seconds of traffic take a second. With `--steps` stages
take what they took where `mixed_traffic.py --steps` wrote that file: `StageTimes` are fitted to it, and the scheduler
begins with estimates and learns, as in an engine. Hosts take `--host-ms` from a result to the plan that builds on it,
and at least `--prompts-ms` to start the operations of a step with prompts, which the scheduler is not told.
`--pause-ms` stops the first stage once, in the middle of the arrivals. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from arrivals import RequestTimes, summarize
from report import print_report
from traffic import Traffic, parse_traffic
from workload import exactly, model_settings

from raypp.api.timeline import Forward
from raypp.messages import BlockGroup, StepPlan, StepResult
from raypp.models.config import load_model_config
from raypp.models.registry import resolve_model_path
from raypp.plan.cost_model import estimated_times
from raypp.plan.hardware import Gpu
from raypp.plan.speculation_plan import draft_cost
from raypp.request import Request
from raypp.scheduler.limits import SchedulerLimits
from raypp.scheduler.scheduler import Scheduler
from raypp.scheduler.step_budget import (
    RooflineCost,
    StageTimes,
    StepPredictor,
    StepWork,
    amounts,
    step_ms,
    step_work,
)

_DTYPE_BYTES = {"cuda": 2, "cpu": 4}
_VOCAB_SIZE = 1000
_REPORT_STEPS = 12  # after so many steps the stages report


class Hosts(NamedTuple):
    """What hosts add to the stages' times, milliseconds."""

    plan_ms: float = 1.0
    """From a result to the plan that builds on it."""
    prompts_ms: float = 0.0
    """The least that a step with prompts takes: starting its operations."""
    pause_ms: float = 0.0
    """For which the first stage stops once."""


class SimulatedStages:
    """Stages that take a known time for a step, one after the other, and wait for the feedback that a plan requires."""

    def __init__(
        self,
        limits: SchedulerLimits,
        times: Sequence[StageTimes],
        predictor: StepPredictor,
        hosts: Hosts,
    ) -> None:
        self._roofline = predictor.roofline
        self._times = times
        self._hosts = hosts
        self._pauses_at = math.inf
        self._predictor = predictor
        self._scheduler = Scheduler(limits, predictor=predictor)
        self._free_at = [0.0] * len(times)
        self._fed_back_at: list[float] = []  # of each step
        self._in_flight: deque[StepPlan] = deque()
        self._steps: list[tuple[StepWork, list[float]]] = []
        self.busy_ms = [0.0] * len(times)
        self.slowest_ms = 0.0

    @property
    def num_steps(self) -> int:
        """Steps so far."""
        return len(self._steps)

    def run(self, arrivals: Sequence[tuple[float, Request]]) -> tuple[list[RequestTimes], float]:
        """Run requests that are due at some moments, ms; return their times, and when the last stage ended, seconds."""
        waiting = deque(sorted(arrivals, key=lambda arrival: arrival[0]))
        times = {request.request_id: RequestTimes(request.params.max_tokens or 0) for _, request in arrivals}
        due = {request.request_id: due_ms for due_ms, request in arrivals}
        if self._hosts.pause_ms:
            self._pauses_at = waiting[len(waiting) // 2][0]
        now = 0.0
        while True:
            while waiting and waiting[0][0] <= now:
                self._scheduler.add(waiting.popleft()[1])
            while (plan := self._scheduler.schedule()) is not None:
                self._execute(plan, now)
            events = [self._told_at(self._in_flight[0])] if self._in_flight else []
            events += [waiting[0][0]] if waiting else []
            if not events:
                return list(times.values()), max(self._free_at) / 1e3
            now = max(now, min(events))
            while self._in_flight and self._told_at(self._in_flight[0]) <= now:
                plan = self._in_flight.popleft()
                told_at = self._told_at(plan)
                for update in self._scheduler.update(_result(plan)):
                    request_id = update.request.request_id
                    times[request_id].pieces_s += [(told_at - due[request_id]) / 1e3] * len(update.new_token_ids)

    def _told_at(self, plan: StepPlan) -> float:
        return self._fed_back_at[plan.step_id] + self._hosts.plan_ms / 2

    def _execute(self, plan: StepPlan, now: float) -> None:
        work = step_work(plan.num_decode_rows, plan.num_scheduled_tokens, plan.num_computed_tokens, plan.samples)
        of_step, required = amounts(work, self._roofline), plan.requires_feedback_of
        least_ms = self._hosts.prompts_ms if work.num_prompt_tokens else 0.0
        times_ms = [max(least_ms, step_ms(of_stage, of_step)) for of_stage in self._times]
        if now >= self._pauses_at:
            self._free_at[0] = max(self._free_at[0], now) + self._hosts.pause_ms
            self._pauses_at = math.inf
        at = max(now + self._hosts.plan_ms / 2, self._fed_back_at[required] if required >= 0 else 0.0)
        for index, took_ms in enumerate(times_ms):
            at = max(at, self._free_at[index]) + took_ms
            self._free_at[index] = at
            self.busy_ms[index] += took_ms
        self.slowest_ms += max(times_ms)
        self._fed_back_at.append(at)
        self._in_flight.append(plan)
        self._steps.append((work, times_ms))
        if not len(self._steps) % _REPORT_STEPS:
            for index in range(len(self._times)):
                reported = self._steps[-_REPORT_STEPS:]
                self._predictor.learn(index, [work for work, _ in reported], [ms[index] for _, ms in reported])


def _result(plan: StepPlan) -> StepResult:
    shape = (len(plan.rows), 1 + plan.num_drafts)
    return StepResult(plan.step_id, np.full(shape, 7, np.int32), plan.samples.astype(np.int32))


def times_of(
    steps: Mapping[str, Sequence[Sequence[Any]]], roofline: RooflineCost, estimates: Sequence[StageTimes]
) -> Any:
    """Return what the parts of a step took on each stage, fitted to the forwards of some runs.

    Args:
        steps: The forwards of each run, as `mixed_traffic.py` keeps them.
        roofline: How the time of products grows with a step's tokens.
        estimates: To begin with.
    """
    fitted = StepPredictor(roofline, estimates)
    forwards = [Forward.of_span(span) for of_run in steps.values() for span in of_run]
    for index in range(len(estimates)):
        of_stage = [forward for forward in forwards if forward.stage_index == index]
        fitted.learn(index, [f.work for f in of_stage], [(f.end_us - f.start_us) / 1e3 for f in of_stage])
    return fitted.stages


def arrivals_of(traffic: Traffic, seed: int) -> list[tuple[float, Request]]:
    """Return the requests of traffic, with the moments at which they are due, ms."""
    rng, due_ms, found = random.Random(seed), 0.0, []
    for number, (turn,) in enumerate(traffic.conversations(_VOCAB_SIZE, seed)):
        params = exactly(turn.num_tokens)
        found.append((due_ms, Request(str(number), np.array(turn.token_ids, np.int32), params, seed=0)))
        due_ms += 0.0 if math.isinf(traffic.rate) else rng.expovariate(traffic.rate) * 1e3
    return found


def simulate(
    traffic: Traffic,
    limits: SchedulerLimits,
    times: Sequence[StageTimes],
    predictor: StepPredictor,
    hosts: Hosts,
    seed: int = 0,
) -> dict[str, Any]:
    """Return how long traffic takes and what its requests wait for.

    Args:
        traffic: What arrives.
        limits: Of the scheduler.
        times: What the parts of a step take on each stage.
        predictor: What the scheduler believes that they take.
        hosts: What they add.
        seed: Of the traffic.
    """
    stages = SimulatedStages(limits, times, predictor, hosts)
    requests, seconds = stages.run(arrivals_of(traffic, seed))
    return {
        "seconds": seconds,
        "num_steps": stages.num_steps,
        "busy": [busy_ms / 1e3 / seconds for busy_ms in stages.busy_ms],
        "slowest_stages_s": stages.slowest_ms / 1e3,
        **summarize(requests),
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-8b", help="a folder of benchmarks/models, or what LLM takes")
    parser.add_argument("--layers", type=int, nargs="+", default=[19, 17], help="of each stage")
    parser.add_argument("--traffic", nargs="+", default=["offline", "online-16", "online-40"], help="see traffic.py")
    parser.add_argument("--limits", type=json.loads, nargs="+", default=[{}], help="of `SchedulerLimits`, by turns")
    parser.add_argument("--steps", type=Path, help="of `mixed_traffic.py`: fit the stages' times to these")
    parser.add_argument("--on-cpu", action="store_true", help="estimates of a CPU, to fit from")
    parser.add_argument("--host-ms", type=float, default=Hosts().plan_ms)
    parser.add_argument("--prompts-ms", type=float, default=Hosts().prompts_ms)
    parser.add_argument("--pause-ms", type=float, default=Hosts().pause_ms)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    hosts = Hosts(args.host_ms, args.prompts_ms, args.pause_ms)
    model = load_model_config(Path(resolve_model_path(model_settings(args.model)["model"])))
    if sum(args.layers) != model.num_layers:
        parser.error(f"--layers {' '.join(map(str, args.layers))}: {args.model} has {model.num_layers} layers")
    device = "cpu" if args.on_cpu else "cuda"
    dtype_bytes = _DTYPE_BYTES[device]
    roofline = draft_cost(model, dtype_bytes, device)
    gpus = None if args.on_cpu else [Gpu(0)] * len(args.layers)
    estimates = estimated_times(
        model, args.layers, dtype_bytes, dtype_bytes, free_tokens=roofline.free_tokens, gpus=gpus
    )
    times = estimates
    if args.steps is not None:
        times = times_of(json.loads(args.steps.read_text()), roofline, estimates)
        for index, of_stage in enumerate(times):
            print(f"stage {index}: {of_stage}")
    figures: dict[str, Any] = {"times": times}
    for name in args.traffic:
        for given in args.limits:
            settings = {
                "num_stages": len(times),
                "max_num_seqs": 256,
                "max_num_batched_tokens": 8192,
                "max_model_len": 4096,
                "block_size": 16,
                "groups": (BlockGroup(65536),),
                "enable_prefix_caching": False,
            }
            begun = time.perf_counter()
            limits = SchedulerLimits(**{**settings, **given})
            predictor = StepPredictor(roofline, estimates)
            found = simulate(parse_traffic(name), limits, times, predictor, hosts, args.seed)
            busy = [round(share, 3) for share in found["busy"]]
            figures[f"{name} {json.dumps(given)}"] = found
            print(
                f"{name} {given or ''}: {found['seconds']:.2f} s, stages busy {busy}, "
                f"first token {found['ttft_ms']['mean']:.0f} ms, p99 {found['ttft_ms']['p99']:.0f}, TPOT "
                f"{found['tpot_ms']['mean']:.2f}, ITL p99 {found['itl_ms']['p99']:.1f}, whole request "
                f"{found['e2e_ms']['mean']:.0f}; simulated in {time.perf_counter() - begun:.1f} s",
                flush=True,
            )
    print_report("simulated_traffic", vars(args), figures)


if __name__ == "__main__":
    main()

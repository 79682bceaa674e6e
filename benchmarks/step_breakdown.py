"""Where a stage's seconds go: what it computed, in which kinds of steps, and how long it waited, for whom.

A step decodes, computes prompts, or both (mixed); its layers ran as one CUDA graph (full graph), as graphs between
attention calls (piecewise), or operation by operation (eager). A stage that computes nothing waits either while another
one computes, which is the bubble that steps of equal time would avoid, or while none does: for a host, or because there
is no request.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from arrivals import percentile
from stage_limit import StageLimit, forward_work

from raypp.api.timeline import Forward, Timeline
from raypp.errors import ConfigError
from raypp.messages import StepForm
from raypp.models.sizes import WeightReads

Span = tuple[int, int]  # from, until, microseconds


def kind_of(forward: Forward) -> str:
    """Return what a step was made of and how its layers ran: decode, full graph."""
    work = forward.work
    made_of = "mixed" if work.num_decode_rows and work.num_prompt_tokens else "decode" if work.num_decode_rows else ""
    return f"{made_of or 'prompts'}, {StepForm(forward.form).name.lower().replace('_', ' ')}"


def breakdown(forwards: Sequence[Forward], limits: Sequence[StageLimit]) -> dict[str, Any]:
    """Return where the seconds went: of each stage, and by kind of step.

    Args:
        forwards: All of one stretch of work.
        limits: What each stage's device could do at best.
    """
    num_stages = len(limits)
    by_stage = [sorted(f for f in forwards if f.stage_index == index) for index in range(num_stages)]
    if not all(by_stage):
        return {"error": "a stage has told of no step"}
    opens, closes = min(f.start_us for f in forwards), max(f.end_us for f in forwards)
    busy = [merged((f.start_us, f.end_us) for f in of_stage) for of_stage in by_stage]
    stages = [
        _stage_figures(of_stage, limits[index], busy[index], busy[:index] + busy[index + 1 :], (opens, closes))
        for index, of_stage in enumerate(by_stage)
    ]
    try:
        bubble = Timeline(forwards, num_stages, [WeightReads(0)] * num_stages).bubble_fraction
    except ConfigError:  # the pipe was never full
        bubble = None
    times_ms: dict[int, list[float]] = {}
    for forward in forwards:
        times_ms.setdefault(forward.step_id, []).append((forward.end_us - forward.start_us) / 1e3)
    whole = [times for times in times_ms.values() if len(times) == num_stages]
    return {
        "seconds": (closes - opens) / 1e6,
        "num_steps": len(times_ms),
        "bubble_fraction": bubble,
        "slowest_stages_s": sum(map(max, whole)) / 1e3,
        "mean_stages_s": sum(map(statistics.fmean, whole)) / 1e3,
        "stages": stages,
    }


def _stage_figures(
    forwards: Sequence[Forward], limit: StageLimit, busy: Sequence[Span], others: Sequence[Sequence[Span]], window: Span
) -> dict[str, Any]:
    seconds = (window[1] - window[0]) / 1e6
    limits_s = [limit.seconds(forward_work(forward)) for forward in forwards]
    computing_s = sum(f.end_us - f.start_us for f in forwards) / 1e6
    anyone = merged(span for of_other in others for span in of_other)
    waits = [(before[1], after[0]) for before, after in pairwise([(0, window[0]), *busy, (window[1], 0)])]
    waiting_s = _covered_us(waits) / 1e6
    beside_s = waiting_s + (_covered_us(anyone) - _covered_us(merged([*waits, *anyone]))) / 1e6
    kinds: dict[str, list[tuple[Forward, float]]] = {}
    for forward, limit_s in zip(forwards, limits_s, strict=True):
        kinds.setdefault(kind_of(forward), []).append((forward, limit_s))
    return {
        "computing_s": computing_s,
        "waiting_beside_another_s": beside_s,
        "waiting_with_all_s": waiting_s - beside_s,
        "prediction_error": prediction_error(forwards),
        "share_of_limit_while_computing": sum(limits_s) / computing_s if computing_s else 0.0,
        "share_of_limit": sum(limits_s) / seconds if seconds else 0.0,
        "steps": {kind: _kind_figures(found) for kind, found in sorted(kinds.items())},
    }


def prediction_error(forwards: Sequence[Forward]) -> dict[str, float] | None:
    """Return how far the scheduler's milliseconds were from those that steps took, as shares of these; None: unknown.

    `mean_signed` is more than 0 where it expected too much.
    """
    errors = [
        f.predicted_us / (f.end_us - f.start_us) - 1 for f in forwards if f.predicted_us and f.end_us > f.start_us
    ]
    if not errors:
        return None
    sizes = [abs(error) for error in errors]
    return {
        "median": statistics.median(sizes),
        "p90": percentile(sizes, 0.9),
        "mean_signed": statistics.fmean(errors),
    }


def _kind_figures(found: Sequence[tuple[Forward, float]]) -> dict[str, Any]:
    times_ms = [(forward.end_us - forward.start_us) / 1e3 for forward, _ in found]
    works = [forward.work for forward, _ in found]
    return {
        "num": len(found),
        "seconds": sum(times_ms) / 1e3,
        "ms_mean": statistics.fmean(times_ms),
        "ms_median": statistics.median(times_ms),
        "ms_p99": percentile(times_ms, 0.99),
        "decode_rows": statistics.fmean(work.num_decode_rows for work in works),
        "decode_kv": statistics.fmean(work.num_decode_kv for work in works),
        "prompt_tokens": statistics.fmean(work.num_prompt_tokens for work in works),
        "prediction_error": prediction_error([forward for forward, _ in found]),
        "prompt_pairs": statistics.fmean(work.num_prompt_pairs for work in works),
        "share_of_limit": sum(limit_s for _, limit_s in found) / max(1e-9, sum(times_ms) / 1e3),
    }


def table(figures: Mapping[str, Any]) -> list[str]:
    """Return the lines that say where the seconds of a stretch went."""
    if "error" in figures:
        return [f"  {figures['error']}"]
    bubble = "-" if figures["bubble_fraction"] is None else f"{figures['bubble_fraction']:.3f}"
    lines = [f"  {figures['num_steps']} steps in {figures['seconds']:.2f} s, bubble fraction {bubble}"]
    for index, stage in enumerate(figures["stages"]):
        lines.append(
            f"  stage {index}: computes {stage['computing_s']:.2f} s, waits {stage['waiting_beside_another_s']:.2f} s "
            f"beside another, {stage['waiting_with_all_s']:.2f} s with all; "
            f"{stage['share_of_limit_while_computing']:.1%} of the limit while computing, "
            f"{stage['share_of_limit']:.1%} in all{_said(stage)}"
        )
        lines += [
            f"    {kind:18} {of['num']:5.0f} x {of['ms_mean']:8.2f} ms = {of['seconds']:7.2f} s, p99 "
            f"{of['ms_p99']:8.2f} ms; {of['decode_rows']:6.1f} decode rows, {of['prompt_tokens']:7.1f} prompt tokens; "
            f"{of['share_of_limit']:.1%} of the limit{_said(of)}"
            for kind, of in stage["steps"].items()
        ]
    return lines


def _said(figures: Mapping[str, Any]) -> str:
    error = figures["prediction_error"]
    return "" if error is None else f"; predicted within {error['median']:.1%}, p90 {error['p90']:.1%}"


def merged(spans: Iterable[Span]) -> list[Span]:
    """Return spans in their order, those that touch made one."""
    found: list[Span] = []
    for since, until in sorted(spans):
        if found and since <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], until))
        else:
            found.append((since, until))
    return found


def _covered_us(spans: Iterable[Span]) -> int:
    return sum(until - since for since, until in spans)

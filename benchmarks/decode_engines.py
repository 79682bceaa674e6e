"""The engines of the decode table, and how long each takes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peer import COMPARED, Compared, on_line
from workload import model_settings

from raypp.models.config import load_model_config
from raypp.models.registry import resolve_model_path
from raypp.plan.layer_partition import even_partition

PARTS = ("graphs", "start", "even", "eager", "speculation", "adaptive")
FORCED_RATE, FIXED_DRAFTS = 0.7, 4
_FEW_REQUESTS = (1, 16, 64, 256)
_EAGER_REQUESTS = (1, 16, 64)
_START_S, _CLOSE_S = 35.0, 5.0


@dataclass(frozen=True)
class EngineRun:
    """An engine with some settings, and the numbers of requests to measure with it."""

    model: str
    part: str
    requests: Sequence[int]
    settings: Mapping[str, Any] = field(default_factory=dict)
    slowness: float = 1.0
    """Time per token, as a multiple of the peer's: a guess."""
    more_start_s: float = 0.0
    """What the start takes more than the usual: a guess."""

    @property
    def name(self) -> str:
        """What the report calls it."""
        return f"{self.model} {self.part}"

    @property
    def compared(self) -> Compared:
        """The figures to compare with."""
        return COMPARED.get(self.model, Compared())


def engine_runs(model: str, args: argparse.Namespace) -> list[EngineRun]:
    """Return the engines of the parts that are asked for, in the order of `PARTS`."""
    few = tuple(count for count in _FEW_REQUESTS if count in args.requests) or tuple(args.requests)
    eager = tuple(count for count in _EAGER_REQUESTS if count in args.requests) or tuple(args.requests)
    fixed = {
        "method": "ngram",
        "num_speculative_tokens": FIXED_DRAFTS,
        "forced_acceptance_rate": FORCED_RATE,
    }
    by_rate = {rate: {"method": "ngram", "forced_acceptance_rate": rate} for rate in (0.0, FORCED_RATE)}
    none_accepted = EngineRun(model, "adaptive drafts", few, {"speculative": by_rate[0.0]}, more_start_s=25)
    accepted = EngineRun(
        model, f"adaptive drafts at {FORCED_RATE}", few, {"speculative": by_rate[FORCED_RATE]}, more_start_s=25
    )
    runs = {
        "graphs": [EngineRun(model, "graphs", tuple(args.requests))],
        "start": [EngineRun(model, "start again", ())],
        "even": [EngineRun(model, "even", few, {"layer_partition": _even(model, args.num_stages)})],
        "eager": [EngineRun(model, "eager", eager, {"mode": "none"}, slowness=4.0)],
        "speculation": [
            EngineRun(model, "fixed drafts", few, {"speculative": fixed}, slowness=0.5, more_start_s=10),
            none_accepted,
        ],
        "adaptive": [none_accepted, accepted],
    }
    if "graphs" not in args.parts:
        for part in ("speculation", "adaptive"):
            runs[part].insert(0, EngineRun(model, "graphs", few))
    asked = [run for part in PARTS if part in args.parts for run in runs[part]]
    return list({run.name: run for run in asked}.values())


def predicted_point_s(run: EngineRun, num_requests: int, args: argparse.Namespace) -> float:
    """Return about how long one number of requests takes, seconds; without figures of the model, a guess at 5 ms."""
    compared = run.compared
    itl_ms = on_line({count: point.itl_ms for count, point in compared.peer.items()} or {1: 5.0}, num_requests)
    first_s = 0.02 + num_requests * args.input_len / compared.prefill_tokens_per_s
    return args.runs * (2 * first_s + run.slowness * itl_ms / 1e3 * (args.output_len - 1))


def predicted_s(run: EngineRun, args: argparse.Namespace, num_points: int | None = None) -> float:
    """Return about how long an engine takes, its start and end too, with its first points or all."""
    points = sum(predicted_point_s(run, count, args) for count in run.requests[:num_points])
    return _START_S + run.more_start_s + points + _CLOSE_S


def _even(model: str, num_stages: int) -> list[int]:
    path = Path(resolve_model_path(model_settings(model)["model"]))
    return even_partition(load_model_config(path).num_layers, num_stages)

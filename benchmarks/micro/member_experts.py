"""What one member's experts take: a part of each expert, or some whole ones. One GPU times one member's share.

    python benchmarks/micro/member_experts.py [--models 30b deepseek-v3] [--rows 1 16 64 256]

With parts all members take as long. With whole experts they wait for the one with most to do: timed is, in each layer,
the member of whose experts the rows choose the most, and one taken at random. Weights and tokens are random, the router
is the model's kind; router, norm and the sum of a token's experts are timed, the sum over members is not. Layers have
weights of their own in one CUDA graph, so that the second-level cache does not help. `predicted` is the ratio of the
times of whole experts and parts by the bytes that each reads. The last line is JSON.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from graph_timer import require_gpu, try_us
from tune_experts import BF16, EPS, LAYER_BYTES, MOST_LAYERS, SHAPES, random_weight

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import print_report

from raypp.models.sizes import WeightReads
from raypp.ops.backend import ExpertWeights, Router, Routing, choose_experts
from raypp.ops.cuda.experts import CudaExperts, ExpertShape
from raypp.ops.cuda.kernel_launch import Device, Workspace

BY_GROUPS = Routing(8, normalizes=True, has_sigmoid=True, num_groups=8, num_chosen_groups=4, scaling=2.5)
MODELS = {
    "30b": (SHAPES["30b"], Routing(8, normalizes=True), ("plain", "fp8"), (2, 4, 8)),
    "deepseek-v3": (ExpertShape(7168, 2048, 256, 8), BY_GROUPS, ("fp8",), (8, 16)),
}
"""Sizes, router, forms of the weights, numbers of members."""
BLOCK = 128


@dataclass(frozen=True)
class Share:
    """One member's weights of several layers."""

    weights: Sequence[ExpertWeights]
    routers: Sequence[Router]
    routing: Routing

    @classmethod
    def random(cls, shape: ExpertShape, held: int, routing: Routing) -> Share:
        """Return random ones, `held` of the experts, of which each has the shape's intermediate size."""
        sizes = (held, 2 * shape.intermediate, shape.hidden), (held, shape.hidden, shape.intermediate)
        weights, routers = list[ExpertWeights](), list[Router]()
        while len(weights) < 2 or (len(weights) < MOST_LAYERS and len(weights) * weights[0].num_bytes < LAYER_BYTES):
            gate_up, down = (random_weight(size, kind) for size, kind in zip(sizes, shape.kinds, strict=True))
            weights.append(ExpertWeights(gate_up, down, num_others=shape.num_experts - held))
            router = torch.empty(shape.num_experts, shape.hidden, device="cuda", dtype=BF16).normal_(0, 0.02)
            correction = torch.zeros(shape.num_experts, device="cuda") if routing.has_sigmoid else None
            routers.append(Router(router, routing, correction=correction))
        return cls(weights, routers, routing)

    def num_chosen(self, hidden: torch.Tensor, index: int) -> list[int]:
        """Return how many experts of each member the rows choose in a layer."""
        router, weights = self.routers[index], self.weights[index]
        normed = torch.nn.functional.rms_norm(hidden.float(), hidden.shape[1:], None, EPS)
        experts, _ = choose_experts(normed @ router.weight.float().t(), self.routing, router.correction)
        held, distinct = len(weights.down.data), experts.unique()
        return torch.bincount(distinct // held, minlength=(held + weights.num_others) // held).tolist()

    def layers(self, firsts: Sequence[int]) -> list[CudaExperts]:
        """Return the layers of a member whose first experts have these numbers."""
        device = torch.device("cuda")
        norm, workspace = torch.ones(self.routers[0].weight.shape[1], device=device, dtype=BF16), Workspace(device)
        return [
            CudaExperts(norm, EPS, router, replace(weights, first=first), Device.of(device), workspace)
            for weights, router, first in zip(self.weights, self.routers, firsts, strict=True)
        ]


def time_share(share: Share, hidden: torch.Tensor, firsts: Sequence[int]) -> float | str:
    """Return microseconds per layer."""
    return try_us([partial(layer, hidden.clone()) for layer in share.layers(firsts)])


def measure(name: str, kind: str, num_members: int, all_rows: Sequence[int]) -> dict[str, Any]:
    """Return the times of both cuts by the number of rows, and print them."""
    shape, routing = MODELS[name][:2]
    size, held = shape.intermediate // num_members, shape.num_experts // num_members
    of_part = "plain" if kind == "fp8" and size % BLOCK else kind  # as members of a stage have it
    kinds = replace(shape, intermediate=size, kinds=(kind, of_part)), replace(shape, kinds=(kind, kind))
    found = dict[str, Any]()
    parts, whole = Share.random(kinds[0], shape.num_experts, routing), Share.random(kinds[1], held, routing)
    chosen = routing.num_chosen / shape.num_experts
    reads = (
        WeightReads(0, parts.weights[0].num_bytes, chosen),
        WeightReads(0, whole.weights[0].num_bytes, chosen, shape.num_experts, num_members),
    )
    for num_rows in all_rows:
        torch.manual_seed(num_rows)
        hidden = torch.randn(num_rows, shape.hidden, device="cuda", dtype=BF16)
        counts = [whole.num_chosen(hidden, index) for index in range(len(whole.weights))]
        fullest = [held * each.index(max(each)) for each in counts]
        row = {
            "parts_us": time_share(parts, hidden, [0] * len(parts.weights)),
            "whole_us": time_share(whole, hidden, fullest),
            "any_whole_us": time_share(whole, hidden, [0] * len(counts)),
            "experts_of_the_fullest": round(sum(map(max, counts)) / len(counts), 2),
            "experts_of_any": round(sum(each[0] for each in counts) / len(counts), 2),
            "predicted": round(reads[1].of(num_rows) / reads[0].of(num_rows), 2),
        }
        if isinstance(row["parts_us"], float) and isinstance(row["whole_us"], float):
            row["ratio"] = round(row["whole_us"] / row["parts_us"], 2)
        found[str(num_rows)] = row
        print(f"{name} {kind:<6}{num_members:>3} members {num_rows:>4} rows {row}", flush=True)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", choices=list(MODELS), nargs="+", default=list(MODELS))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    args = parser.parse_args()
    require_gpu()
    figures = dict[str, Any]()
    with torch.inference_mode():
        for name in args.models:
            for kind in MODELS[name][2]:
                for num_members in MODELS[name][3]:
                    figures[f"{name}, {kind}, {num_members} members"] = measure(name, kind, num_members, args.rows)
    print_report("member_experts", {"models": args.models, "rows": args.rows}, figures)


if __name__ == "__main__":
    main()

"""Draws of the members of a stage: microseconds of a choice in a graph; two GPUs or more.

    python benchmarks/micro/member_draws.py --rows 1 16 64 256 --vocab 151936

Each member is a process with a GPU and has its part of random logits, float32. A graph has 20 choices; the median of
its replays:

    greedy    the best token, one exchange
    qwen      top_k 20, top_p 0.95, temperature 0.6, of logits with a deviation of 3
    flat      top_p 0.9 alone, of logits with a deviation of 0.01
    joined    as qwen, but all logits are gathered, and each member draws from all: what was before
    alone     as qwen, of all logits, by one GPU: what a stage of one member takes

Tokens are compared with those of one GPU. `NCCL_P2P_DISABLE=1` measures GPUs that do not reach each other. With
`--cold` other bytes went through the second-level cache before each choice, as layers' weights do in a step. The last
line is JSON.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from graph_timer import time_us
from member_processes import run_members

from raypp.ops.cuda.draw_kernels import TokenChooser
from raypp.ops.cuda.kernel_launch import Device, Workspace
from raypp.ops.cuda.member_draws import MemberChooser
from raypp.ops.sample.tables import AdjustedLogits, RowTables
from raypp.ops.sample.vocabulary_part import VocabularyPart

_CHOICES = 20
_OTHER_BYTES = 256 << 20


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--cold", action="store_true", help="with caches that hold other bytes, as in a step")
    args = parser.parse_args()
    run_members("member_draws", _measure, args)


def _measure(members: Any, device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    part = VocabularyPart(members, args.vocab)
    rank = members.rank
    figures: dict[str, float] = {}
    other = torch.empty(_OTHER_BYTES if args.cold else 0, dtype=torch.int8, device=device)
    before = [lambda: other.add_(1)] if args.cold else []
    others_us = time_us(before * _CHOICES) if before else 0.0
    for rows in args.rows:
        for name, choose in _ways(rows, part, device).items():
            us = time_us([*before, choose] * _CHOICES) * len([*before, choose]) - others_us
            figures[f"{rows} rows, {name}"] = us = round(us, 2)
            if rank == 0:
                print(f"{rows:4d} rows, {name:<8}{us:9.2f} us", flush=True)
    return figures


def _ways(rows: int, part: VocabularyPart, device: torch.device) -> dict[str, Callable[[], torch.Tensor]]:
    """Return what chooses tokens, each way."""
    sizes = (rows, Device.of(device), Workspace(device))
    chooser, whole = MemberChooser(*sizes, part), TokenChooser(*sizes)
    at = torch.arange(rows, device=device)
    normal = torch.randn(rows, part.vocab_size, generator=torch.Generator(device).manual_seed(rows), device=device)
    ways = {}
    for name, scale, *truncation in (("qwen", 3.0, 20, 0.95, 0.6), ("flat", 0.01, 0, 0.9, 1.0)):
        logits = AdjustedLogits(normal * scale)
        own = torch.full((rows, part.size), -torch.inf, device=device)
        own[:, : part.num_tokens] = logits.own[:, part.first : part.first + part.num_tokens]
        asked = (at, at + 99, _tables(rows, *truncation, device))
        given = AdjustedLogits(own)

        def draw(given: AdjustedLogits = given, asked: Any = asked) -> torch.Tensor:
            return chooser.draw(given, *asked)

        def alone(logits: AdjustedLogits = logits, asked: Any = asked) -> torch.Tensor:
            return whole.draw(logits, *asked)

        def joined(own: torch.Tensor = own, asked: Any = asked) -> torch.Tensor:
            of_all = part.members.gathered(own).transpose(0, 1).reshape(rows, -1)[:, : part.vocab_size]
            return whole.draw(AdjustedLogits(of_all.contiguous()), *asked)

        assert torch.equal(draw(), alone()), f"{name}: members draw other tokens than one GPU"
        ways[name] = draw
        if name == "qwen":
            ways |= {"joined": joined, "alone": alone, "greedy": lambda given=given: chooser.greedy(given)}
    return ways


def _tables(rows: int, top_k: int, top_p: float, temperature: float, device: torch.device) -> RowTables:
    return RowTables(
        temperature=torch.full((rows,), temperature, device=device),
        top_k=torch.full((rows,), top_k, dtype=torch.int32, device=device),
        top_p=torch.full((rows,), top_p, device=device),
        min_p=torch.zeros(rows, device=device),
        seed=torch.arange(rows, device=device),
    )


if __name__ == "__main__":
    main()

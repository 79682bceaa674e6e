"""The two parts of drafting by an EAGLE-3 head, as CUDA graphs and operation by operation: a dummy head on one GPU.

    python benchmarks/micro/eagle_parts.py --rows 1 8 32 --num-drafts 4

    follow    a decode step's 1 + K tokens of every row enter the head
    propose   its layer runs K times; weights are read K times, the bound is what that takes at 4.3 TB/s

Per number of rows: milliseconds of the device and of the host, for both ways; with the head's weights in 8 bits, and as
the model's. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from graph_timer import step_ms
from report import print_report

from raypp.graphs.manager import CudaGraphManager, graph_maker
from raypp.models.config import load_model_config
from raypp.models.draft_head import DraftHead
from raypp.models.draft_head_config import load_draft_head_config
from raypp.models.weights import DummyWeights, WeightReader
from raypp.ops.backend import choose_kernels, choose_token_choice
from raypp.ops.kv_cache import allocate_kv_cache
from raypp.specdec.eagle import EagleProposer
from raypp.specdec.proposer import DraftingRows, SteppedHidden, SteppedTokens

_MODELS = Path(__file__).parents[1] / "models"
_BLOCK_SIZE = 16
_BYTES_PER_MS = 4.3e9


class _Target:
    """Gives the head an embedding; the head brings the rest."""

    def __init__(self, vocab_size: int, hidden_size: int, device: torch.device) -> None:
        self._embedding = torch.randn(vocab_size, hidden_size, device=device, dtype=torch.bfloat16)

    def head_embedding(self) -> torch.Tensor:
        return self._embedding

    def normalize(self, hidden: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a head of this kind has a norm of its own")

    def project(self, normalized: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a head of this kind has an LM head of its own")


def measure(weights: str, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return times in milliseconds with the head's weights in 8 bits ("fp8") or as the model's ("model")."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    target = load_model_config(_MODELS / "qwen3-8b")
    config = load_draft_head_config(_MODELS / "qwen3-8b-eagle3", target, is_dummy=True)
    config = replace(config, has_8_bit_weights=weights == "fp8")
    most, width = max(args.rows), -(-args.context // _BLOCK_SIZE) + 2
    head = DraftHead(
        config,
        _Target(target.vocab_size, target.hidden_size, device),
        WeightReader(DummyWeights(0, device), dtype, device),
        choose_kernels(device, dtype, block_size=_BLOCK_SIZE, max_rows=most),
        choose_token_choice(device, most),
    )
    layer = config.layer
    cache = allocate_kv_cache(1 + most * width, _BLOCK_SIZE, layer.num_kv_heads, layer.head_dim, dtype, device)
    tables = torch.arange(1, 1 + most * width, dtype=torch.int32, device=device).view(most, width)
    proposer = EagleProposer(
        head, cache, tables, num_drafts=args.num_drafts, max_len=args.context + 2 * args.num_drafts
    )
    graphs = CudaGraphManager(graph_maker(device))
    num_bytes = config.drafting_bytes(args.num_drafts, 2)
    figures: dict[str, dict[str, float]] = {f"{weights} bound": {"device_ms": num_bytes / _BYTES_PER_MS}}
    print(f"{weights:5s} bound {num_bytes / _BYTES_PER_MS:.3f} ms: {num_bytes / 2**20:.0f} MiB of weights")
    with torch.inference_mode(), graphs.recording():
        for rows in sorted(args.rows, reverse=True):
            tokens = rows * (1 + args.num_drafts)
            positions = torch.arange(args.context, args.context + 1 + args.num_drafts, device=device).repeat(rows)
            hidden = torch.randn(tokens, target.hidden_size, dtype=dtype, device=device)
            step = SteppedTokens(
                rows=torch.arange(rows, device=device),
                token_ids=torch.ones(rows, 1 + args.num_drafts, dtype=torch.int32, device=device),
                num_valid=torch.full((rows,), 2, dtype=torch.int32, device=device),
                num_decode_rows=rows,
                token_indices=torch.arange(tokens, device=device),
                hidden=SteppedHidden(hidden, positions, positions % _BLOCK_SIZE, [hidden] * 3, None),
            )
            followed = proposer.follow(step)
            lengths = torch.full((rows,), args.context + 2, device=device)
            drafting = DraftingRows(step.rows, lengths, args.context + 2)
            programs: dict[str, Callable[[], object]] = {
                "follow": lambda step=step: proposer.follow(step),
                "propose": lambda drafting=drafting, followed=followed: proposer.propose(drafting, followed),
            }
            for name, program in programs.items():
                graphs.record(name, (name, rows), program)
                for way, run in (("eager", program), ("graph", lambda key=(name, rows): graphs.run(key))):
                    device_ms, host_ms = step_ms(run)
                    point = f"{weights} {name} {rows} rows {way}"
                    figures[point] = {"device_ms": device_ms, "host_ms": host_ms}
                    print(f"{point:32s} device {device_ms:.3f} ms, host {host_ms:.3f} ms", flush=True)
    print(json.dumps({name: [cost.num_graphs, round(cost.seconds, 2)] for name, cost in graphs.costs.items()}))
    return figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--num-drafts", type=int, default=4)
    parser.add_argument("--context", type=int, default=640)
    parser.add_argument("--head-weights", nargs="+", choices=("fp8", "model"), default=["fp8", "model"])
    args = parser.parse_args()
    figures: dict[str, dict[str, float]] = {}
    for weights in args.head_weights:
        figures |= measure(weights, args)
    print_report("eagle_parts", vars(args), figures)


if __name__ == "__main__":
    main()

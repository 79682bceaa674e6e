"""A draft head with random weights, and the two parts of drafting by it, ready to be timed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from raypp.models.config import load_model_config
from raypp.models.draft_head import DraftHead
from raypp.models.draft_head_config import load_draft_head_config
from raypp.models.weights import DummyWeights, WeightReader
from raypp.ops.device_kernels import choose_kernels, choose_token_choice
from raypp.ops.kv_cache import allocate_layer_cache
from raypp.ops.row_tokens import StepTokens
from raypp.specdec.eagle import EagleProposer
from raypp.specdec.proposer import Drafts, Followed, StepHidden

_MODELS = Path(__file__).parents[1] / "models"
_TARGET = "qwen3-8b"
_BLOCK_SIZE = 16


def is_head(folder: Path) -> bool:
    """Return whether a folder is of a draft head."""
    names = json.loads((folder / "config.json").read_text()).get("architectures") or []
    return any("eagle" in name.lower() for name in names)


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


class HeadDrafts:
    """An EAGLE-3 head for Qwen3-8B on a GPU.

    Args:
        name: A folder of benchmarks/models.
        weights: "fp8" or "model": what own kernels read.
        most_rows: Of a step.
        num_drafts: K.
        context: Tokens of a row.
        workspace_floats: That kernels have at least.
    """

    def __init__(
        self, name: str, weights: str, most_rows: int, num_drafts: int, context: int, *, workspace_floats: int = 0
    ) -> None:
        device, dtype = torch.device("cuda"), torch.bfloat16
        target = load_model_config(_MODELS / _TARGET)
        config = load_draft_head_config(_MODELS / name, target, is_dummy=True)
        self.config = replace(config, has_8_bit_weights=weights == "fp8")
        kernels = choose_kernels(device, dtype, block_size=_BLOCK_SIZE)
        if workspace_floats:
            kernels._workspace.reserve(workspace_floats)
        self.head = DraftHead(
            self.config,
            _Target(target.vocab_size, target.hidden_size, device),
            WeightReader(DummyWeights(0, device), dtype, device),
            kernels,
            choose_token_choice(device, most_rows),
        )
        layer, width = config.layer, -(-context // _BLOCK_SIZE) + 2
        num_blocks = 1 + most_rows * width
        sizes = (layer.num_kv_heads, layer.head_dim, layer.head_dim)
        cache = allocate_layer_cache(num_blocks, _BLOCK_SIZE, *sizes, dtype, device)
        tables = torch.arange(1, num_blocks, dtype=torch.int32, device=device).view(1, most_rows, width)
        self._proposer = EagleProposer(
            self.head, cache, tables, num_drafts=num_drafts, max_len=context + 2 * num_drafts
        )
        self._hidden_size, self._num_drafts, self._context = target.hidden_size, num_drafts, context

    def follow(self, num_rows: int) -> Callable[[], Followed]:
        """Return what lets a step's 1 + K tokens of every row enter."""
        device, width = torch.device("cuda"), 1 + self._num_drafts
        positions = torch.arange(self._context, self._context + width, device=device).repeat(num_rows)
        hidden = torch.randn(num_rows * width, self._hidden_size, dtype=torch.bfloat16, device=device)
        rows, indices = torch.arange(num_rows, device=device), torch.arange(num_rows * width, device=device)
        token_ids = torch.ones(num_rows, width, dtype=torch.int32, device=device)
        tokens = StepTokens(rows, rows, token_ids, torch.full((num_rows,), 2, dtype=torch.int32, device=device))
        step = StepHidden(hidden, positions, positions % _BLOCK_SIZE, [hidden] * 3, num_rows, indices)
        return lambda: self._proposer.follow(tokens, step)

    def proposal(self, num_rows: int) -> Callable[[], Drafts]:
        """Return what proposes K drafts for every row."""
        device, followed = torch.device("cuda"), self.follow(num_rows)()
        lengths = torch.full((num_rows,), self._context + 2, device=device)
        rows, most = torch.arange(num_rows, device=device), self._context + 2
        tokens = StepTokens(rows, lengths, lengths.unsqueeze(1), lengths=lengths)
        # A layer may overwrite what it gets: twice the same would not be.
        return lambda: self._proposer.propose(tokens, tuple(tensor.clone() for tensor in followed), most)

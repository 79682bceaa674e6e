"""A stage whose model only takes time: everything around the model is real, so what is measured is the pipeline."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from raypp.graphs.cost import GRAPH_MODES, GraphCost, GraphMode
from raypp.models.config import ModelConfig
from raypp.models.decoder import Deepstack
from raypp.ops.attention import AttentionBatch
from raypp.ops.row_state import LayerMemory
from raypp.stage.stage_spec import StageSpec


@dataclass(frozen=True)
class FakeStage:
    """A stage factory: `LLM(..., device="cpu", stage_factory=FakeStage(step_ms=5))` runs every stage on a `FakeModel`.

    Args:
        step_ms: How long each stage's forward takes, milliseconds.
    """

    step_ms: float = 5.0

    def __call__(self, spec: StageSpec, config: ModelConfig) -> FakeModel:
        """Return the model of one stage."""
        return FakeModel(self.step_ms / 1e3, config.vocab_size)


class FakeModel:
    """Sleeps instead of computing. The token after any token t is (t + 1) modulo the vocabulary."""

    hidden_size = 1
    taps: Mapping[int, torch.Tensor] = MappingProxyType({})
    costs: Mapping[str, GraphCost] = MappingProxyType({})
    draft_head = None

    def __init__(self, step_s: float, vocab_size: int) -> None:
        self._step_s = step_s
        self._vocab_size = vocab_size
        self._logits = torch.zeros(0, vocab_size)
        self._ones = torch.zeros(0, 1, dtype=torch.int64)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the token ids themselves, [T, 1]."""
        return input_ids.to(torch.float32).unsqueeze(1)

    def embed_items(self, rows: torch.Tensor) -> torch.Tensor:
        """Return embeddings of images as they are."""
        return rows

    def forward(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBatch,
        kv_caches: Sequence[LayerMemory],
        deepstack: Deepstack | None = None,
    ) -> torch.Tensor:
        """Return the residual stream unchanged, after the configured time."""
        if self._step_s:  # sleeping for no time gives the processor away
            time.sleep(self._step_s)
        return hidden

    @property
    def attention_sizes(self) -> tuple[int, ...]:
        """There is no attention."""
        return ()

    @property
    def graph_modes(self) -> Collection[GraphMode]:
        """It waits, but for no device."""
        return GRAPH_MODES

    def plan_attention(self, attention: AttentionBatch, ring_entry: int) -> None:
        """There is no attention to plan."""

    def compute_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits that are 1 at the next token and 0 elsewhere, [N, V]; in `out` if that is given."""
        if out is not None:
            return out.copy_(self.compute_logits(hidden))
        successors = (hidden.to(torch.int64) + 1) % self._vocab_size
        # A row is all zeros but for the one that the last call left: clearing that is cheaper than making new rows.
        if len(self._logits) < len(hidden):
            self._logits = torch.zeros(len(hidden), self._vocab_size)
            self._ones = successors[:0]
        self._logits[: len(self._ones)].scatter_(1, self._ones, 0.0)
        self._ones = successors
        return self._logits[: len(hidden)].scatter_(1, successors, 1.0)

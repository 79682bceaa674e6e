"""The layers of a stage, and what a stage asks of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import torch

from raypp.graphs.cost import GraphCost, GraphMode
from raypp.models.decoder import Deepstack
from raypp.models.draft_head import DraftHead
from raypp.ops.attention import AttentionBatch
from raypp.ops.row_state import LayerMemory


class StageModel(Protocol):
    """The layers of one stage. T tokens, H hidden size, V vocabulary."""

    hidden_size: int

    @property
    def attention_sizes(self) -> tuple[int, ...]:
        """Elements of attention's output per token, Hq * Dv, of any of the layers; all differ."""

    @property
    def graph_modes(self) -> Collection[GraphMode]:
        """Which graphs can hold the stage's steps; see `GraphMode`."""

    @property
    def taps(self) -> Mapping[int, torch.Tensor]:
        """By depth, the residual stream of the last forward after so many layers, at fixed addresses."""

    @property
    def costs(self) -> Mapping[str, GraphCost]:
        """What was compiled, and what that took."""

    @property
    def draft_head(self) -> DraftHead | None:
        """The head that drafts for the model, on the last stage."""

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the tokens' embeddings, [T, H]. First stage only. input_ids [T] int32.

        Layers that take something of a token besides the residual stream make it wider: what enters the layers has
        `StageSpec.stream_size` elements of a token, and so has what leaves them, of the next stage.
        """

    def embed_items(self, rows: torch.Tensor) -> torch.Tensor:
        """Return embeddings of images, [N, H], as what enters the layers in place of tokens'. First stage only."""

    def forward(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBatch,
        kv_caches: Sequence[LayerMemory],
        deepstack: Deepstack | None = None,
    ) -> torch.Tensor:
        """Return the residual stream after the stage's layers, [T, H].

        positions [T] int64, or [T, 3] when tokens of images are among them; deepstack only for such a step.

        What it launches depends on the shapes alone, but for what is marked as a break point (`raypp.ops.break_point`).
        """

    def plan_attention(self, attention: AttentionBatch, ring_entry: int) -> None:
        """Do the host's part of the step's attention; `ring_entry` says which of its buffers are free."""

    def compute_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits, [N, V] float32; in `out` if that is given. Last stage only. hidden [N, H]."""

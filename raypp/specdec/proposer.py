"""What a proposer of drafts is told, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from raypp.messages import StepPlan
from raypp.ops.attention import AttentionBatch


@dataclass(frozen=True, eq=False)
class SteppedHidden:
    """What a model that drafts from the target's hidden states needs of a step, to fill a KV cache of its own."""

    hidden_states: torch.Tensor  # [T, H], the last layer's output
    positions: torch.Tensor  # [T] int64
    attention: AttentionBatch


@dataclass(frozen=True, eq=False)
class SteppedTokens:
    """A step of the last stage once its tokens are chosen: Y rows that yielded, with 1 + K tokens each."""

    rows: torch.Tensor  # [Y] int64
    lengths: torch.Tensor  # [Y] int64, of the rows, the new tokens included
    token_ids: torch.Tensor  # [Y, 1 + K] int32, valid up to num_valid
    num_valid: torch.Tensor | None  # [Y] int32, at least 1; None: 1 each
    max_length: int  # an upper bound of `lengths` that the host knows
    hidden: SteppedHidden


@dataclass(frozen=True, eq=False)
class Drafts:
    """What was proposed. Every row gets valid token ids, also where the proposer stands behind none."""

    draft_ids: torch.Tensor  # [Y, K_max] int32
    num_proposed: torch.Tensor  # [Y] int32: leading ids that the proposer stands behind; 0 is a miss


class Proposer(Protocol):
    """Proposes the next tokens of rows, at the end of every step of the last stage.

    Runs inside the step's CUDA graph: fixed addresses and shapes, and no word to the host.
    """

    def apply(self, plan: StepPlan) -> None:
        """Take over rows that start. Runs before the step, outside of any graph."""

    def propose(self, step: SteppedTokens) -> Drafts:
        """Return the next drafts of the rows that yielded; called once for each step."""

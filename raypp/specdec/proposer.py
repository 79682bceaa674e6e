"""The protocol of proposers of drafts: what they are told of a step, and what they return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

Followed = tuple[torch.Tensor, ...]
"""What a proposer made of a step and needs to propose after it, each [Y, ...]: one line per row that yielded."""


@dataclass(frozen=True, eq=False)
class StepHidden:
    """What a model that drafts from the target's hidden states needs of a step, to fill a KV cache of its own."""

    hidden_states: torch.Tensor  # [T, H], the last layer's output
    positions: torch.Tensor  # [T] int64
    slot_mapping: torch.Tensor  # [T] int64
    aux: Sequence[torch.Tensor]  # each [T, H], the states that the proposer asked for
    next_token_ids: torch.Tensor | None  # [T] int32, of the tokens after; -1 where this step chooses them. None: all


@dataclass(frozen=True, eq=False)
class VerifiedStep:
    """A step of the last stage once its tokens are chosen: Y rows that yielded, with 1 + K tokens each."""

    rows: torch.Tensor  # [Y] int64
    token_ids: torch.Tensor  # [Y, 1 + K] int32, valid up to num_valid
    num_valid: torch.Tensor | None  # [Y] int32, at least 1; None: 1 each
    num_decode_rows: int  # the first of the Y rows; the others end their prompt, and have one token
    token_indices: torch.Tensor  # [N] int64, where among the step's T tokens stand those before the chosen ones
    hidden: StepHidden


@dataclass(frozen=True, eq=False)
class Drafts:
    """What was proposed. Every row gets valid token ids, also where the proposer stands behind none."""

    draft_ids: torch.Tensor  # [Y, K_max] int32
    num_proposed: torch.Tensor  # [Y] int32: leading ids that the proposer stands behind; 0 is a miss


@dataclass(frozen=True, eq=False)
class DraftingRows:
    """Who is to be proposed drafts. Y rows."""

    rows: torch.Tensor  # [Y] int64
    lengths: torch.Tensor  # [Y] int64, their new tokens included
    max_length: int  # an upper bound of `lengths` that the host knows


class Proposer(Protocol):
    """Proposes the next tokens of rows, at the end of every step of the last stage.

    In two parts, each of which may run inside a CUDA graph: fixed addresses and shapes, and no word to the host. The
    first takes in the step, the second depends on the number of rows alone, whatever step it was.
    """

    is_recorded_apart: bool
    """Whether the two parts are worth recordings of their own: they take long, or many recordings would repeat them."""

    def follow(self, step: VerifiedStep) -> Followed:
        """Take in a step; called once for each, whether something is proposed after it or not."""

    def propose(self, drafting: DraftingRows, followed: Followed) -> Drafts:
        """Return the next drafts of the rows that yielded in the step that was followed last."""

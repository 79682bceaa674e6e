"""The protocol of proposers of drafts: what they get of a step, and what they return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from raypp.ops.row_tokens import StepTokens

Followed = tuple[torch.Tensor, ...]
"""What a proposer made of a step and needs to propose after it, each [Y, ...]: one line per row that yielded."""


@dataclass(frozen=True, eq=False)
class StepHidden:
    """What a model that drafts from the target's hidden states needs of a step, to fill a KV cache of its own."""

    hidden_states: torch.Tensor  # [T, H], the last layer's output
    positions: torch.Tensor  # [T] int64
    slot_mapping: torch.Tensor  # [T] int64
    aux: Sequence[torch.Tensor]  # each [T, H], the states that the proposer asked for
    num_decode_rows: int  # the first of the Y rows that yield; the others end their prompt, and have one token
    token_indices: torch.Tensor  # [N] int64, where among the step's T tokens stand those before the chosen ones
    next_token_ids: torch.Tensor | None = None  # [T] int32, of the tokens after; 0 where this step chooses them


class Drafts(NamedTuple):
    """What was proposed. Every row gets valid token ids, also where the proposer stands behind none."""

    draft_ids: torch.Tensor  # [Y, K_max] int32
    num_proposed: torch.Tensor  # [Y] int32: leading ids that the proposer stands behind; 0 is a miss


class Proposer(Protocol):
    """Proposes the next tokens of rows, at the end of every step of the last stage.

    In two parts, each of which may run inside a CUDA graph: fixed addresses and shapes, and no word to the host. The
    first takes in the step, the second depends on the number of rows alone, whatever step it was.
    """

    has_own_graphs: bool
    """Whether the two parts are worth graphs of their own: they take long, or many graphs would repeat them."""

    def follow(self, tokens: StepTokens, hidden: StepHidden) -> Followed:
        """Take in a step whose drafts are verified; called once for each, whether something is proposed or not."""

    def propose(self, tokens: StepTokens, followed: Followed, max_length: int, most: int) -> Drafts:
        """Return the next drafts of the rows that yielded in the step that was followed last.

        Args:
            tokens: Of the rows. Only they and their lengths count.
            followed: What `follow` returned.
            max_length: An upper bound of the lengths that the host knows.
            most: So many drafts of a row are enough, 1..K_max; where drafts come all at once there may be more.
        """


class HybridProposer:
    """Asks both: which of them a row needs, the host does not know when it orders the step.

    Args:
        first: Proposes from tables alone: it makes nothing of a step.
        second: Any.
    """

    def __init__(self, first: Proposer, second: Proposer) -> None:
        self._first = first
        self._second = second
        self.has_own_graphs = first.has_own_graphs or second.has_own_graphs

    def follow(self, tokens: StepTokens, hidden: StepHidden) -> Followed:
        """Take in a step."""
        return self._second.follow(tokens, hidden)

    def propose(self, tokens: StepTokens, followed: Followed, max_length: int, most: int) -> Drafts:
        """Return the first one's drafts where it stands behind any."""
        first = self._first.propose(tokens, (), max_length, most)
        second = self._second.propose(tokens, followed, max_length, most)
        is_first = first.num_proposed > 0
        return Drafts(
            torch.where(is_first.unsqueeze(1), first.draft_ids, second.draft_ids),
            torch.where(is_first, first.num_proposed, second.num_proposed),
        )

"""The masks of one step's rows, on the device: what they make of its logits, and how many tokens each row may keep."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from raypp.ops.adjust import PositionMasks
from raypp.stage.step_tokens import StepTokens


@dataclass(frozen=True, eq=False)
class StepMasks:
    """Masks of G of the Y rows that the sampler chooses for. K drafts, M masks, W words of a bit mask.

    A row is held to its masks only where they are for its true position and its true drafts; see `MaskUpdate`.
    """

    num_yielding: int  # Y
    yielding: torch.Tensor  # [G] int64, indices into Y
    rows: torch.Tensor  # [G] int64, the rows themselves
    positions: torch.Tensor  # [G] int64, that the rows' first masks are for
    num_masks: torch.Tensor  # [G] int32, at most 1 + K; 0 where there are none
    draft_ids: torch.Tensor  # [G, K] int32, that the later masks are for
    logit_indices: torch.Tensor  # [M] int64, the position among the step's logits of each mask
    bitmasks: torch.Tensor  # [M, W] int32
    last_token_ids: torch.Tensor  # [max_num_seqs] int32, of rows under a grammar; kept up to date by `close`
    is_free: torch.Tensor | None = None  # [G] bool, rows that have no grammar after all; None: all have one
    mask_of: torch.Tensor | None = None  # [N] int32, the same as `logit_indices`, by position; -1: no mask

    def of_positions(self, num_positions: int) -> PositionMasks | None:
        """Return the masks of the step's N positions; None when no row has any in time."""
        if self.mask_of is not None:
            return PositionMasks(self.mask_of, self.bitmasks)
        return PositionMasks(self.by_position(num_positions), self.bitmasks) if len(self.bitmasks) else None

    def by_position(self, num_positions: int) -> torch.Tensor:
        """Return which mask is a position's, int32 [N]; -1: none."""
        numbers = torch.arange(len(self.bitmasks), dtype=torch.int32, device=self.bitmasks.device)
        return numbers.new_full((num_positions,), -1).index_copy_(0, self.logit_indices, numbers)

    def close(self, tokens: StepTokens, draft_ids: torch.Tensor | None) -> StepTokens:
        """Return the tokens that the rows keep: each at most as many as it has masks for.

        A row that keeps none has its last token in front of what it yields, so that whoever looks for the last one
        there finds it.

        Args:
            tokens: As they were chosen, and verified if drafts were.
            draft_ids: [Y, K] int32, the drafts that the step verified; None without any.
        """
        yielding, width = self.yielding, tokens.token_ids.shape[1]
        kept = self._allowed(tokens.positions.index_select(0, yielding), draft_ids)
        if tokens.num_valid is None:  # one token each, and one mask at most
            num_valid = torch.ones(self.num_yielding, dtype=torch.int32, device=yielding.device)
            num_valid.index_copy_(0, yielding, kept)
        else:
            kept = torch.minimum(tokens.num_valid.index_select(0, yielding), kept)
            num_valid = tokens.num_valid.index_copy(0, yielding, kept)
        has_kept = kept > 0
        of_rows = tokens.token_ids.index_select(0, yielding)
        before = self.last_token_ids.index_select(0, self.rows)
        first = last = torch.where(has_kept, of_rows[:, 0], before)
        if width > 1:
            behind = (kept.to(torch.int64) - 1).clamp(min=0).unsqueeze(1)
            last = torch.where(has_kept, of_rows.gather(1, behind).squeeze(1), before)
        of_rows[:, 0] = first
        token_ids = tokens.token_ids.index_copy(0, yielding, of_rows)
        self.last_token_ids.index_copy_(0, self.rows, last)
        closed = replace(tokens, token_ids=token_ids, num_valid=num_valid, lengths=tokens.positions + num_valid)
        if tokens.num_drafted is None or tokens.num_matched is None:
            return closed
        has_yielded = (num_valid > 0).to(torch.int32)
        return replace(
            closed, num_drafted=tokens.num_drafted * has_yielded, num_matched=tokens.num_matched * has_yielded
        )

    def _allowed(self, positions: torch.Tensor, draft_ids: torch.Tensor | None) -> torch.Tensor:
        """Return how many tokens each row may keep, int32 [G]. Shapes: positions [G]; draft_ids [Y, K]."""
        allowed, num_drafts = self.num_masks, self.draft_ids.shape[1]
        if draft_ids is not None and num_drafts:
            is_same = draft_ids.index_select(0, self.yielding)[:, :num_drafts] == self.draft_ids
            allowed = torch.minimum(allowed, 1 + is_same.to(torch.int32).cumprod(1).sum(1, dtype=torch.int32))
        allowed = allowed * (positions == self.positions)
        return allowed if self.is_free is None else allowed.masked_fill(self.is_free, 1 + num_drafts)

"""The masks of grammars in one step: the tokens that they allow, and how many tokens each row may keep.

Y rows that the sampler chooses for, N positions at which it does, K drafts, W words of a bit mask. The kernel is
`raypp.ops.cuda.verify_kernels.hold`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from raypp.ops.row_tokens import StepTokens
from raypp.ops.sample.tables import PositionMasks

FREE = -1
"""The number of masks of a row without a grammar."""


@dataclass(frozen=True, eq=False)
class StepMasks:
    """Masks of a step. A row is held to its masks only where they are for its true position and its true drafts."""

    num_masks: torch.Tensor  # [Y] int32, at most 1 + K; 0 where none came in time, `FREE` where there is no grammar
    positions: torch.Tensor  # [Y] int32, that the rows' first masks are for
    draft_ids: torch.Tensor  # [Y, K] int32, that the later masks are for
    of_positions: PositionMasks


def hold(
    tokens: StepTokens, masks: StepMasks, table: torch.Tensor, draft_table: torch.Tensor | None = None
) -> torch.Tensor:
    """Let each row keep at most as many tokens as it has masks for; return the rows' lengths, int64 [Y].

    A row that keeps none gets its last token as the first that it yields, where others look for its last one. Changes
    the tokens, `num_valid`, which must be there, and the numbers of drafts in place.

    Shapes: table [max_num_seqs, H] int32, the tokens of rows, see `raypp.ops.row_tokens`; draft_table [max_num_seqs, K
    or more] int32, the drafts by row; None: K is 0.
    """
    rows, token_ids, num_valid, num_drafts = tokens.rows, tokens.token_ids, tokens.num_valid, masks.draft_ids.shape[1]
    assert num_valid is not None
    allowed, is_free = masks.num_masks, masks.num_masks == FREE
    if draft_table is not None and num_drafts:
        is_same = draft_table.index_select(0, rows)[:, :num_drafts] == masks.draft_ids
        allowed = torch.minimum(allowed, 1 + is_same.to(torch.int32).cumprod(1).sum(1, dtype=torch.int32))
    allowed = allowed * (tokens.positions == masks.positions)
    num_valid.copy_(torch.where(is_free, num_valid, torch.minimum(num_valid, allowed)))
    has_kept = num_valid > 0
    before = table[rows, (tokens.positions - 1) % table.shape[1]]
    token_ids[:, 0] = torch.where(has_kept, token_ids[:, 0], before)
    for count in (tokens.num_drafted, tokens.num_matched):
        if count is not None:
            count.mul_(has_kept)
    return tokens.positions + num_valid

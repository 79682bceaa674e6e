"""The masks of grammars in one step: the tokens that they allow, and how many tokens each row may keep.

Y rows that the sampler chooses for, N positions at which it does, K drafts, W words of a bit mask. The kernel is
`raypp.ops.cuda.verify_kernels.hold`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

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


@dataclass(frozen=True, eq=False)
class YieldedTokens:
    """What rows yield before masks are looked at. `hold` changes tokens, and how many of them count, in place."""

    rows: torch.Tensor  # [Y] int64
    positions: torch.Tensor  # [Y] int64, of each row's first token, with any stride
    token_ids: torch.Tensor  # [Y, 1 + K] int32 contiguous
    num_valid: torch.Tensor  # [Y] int32
    compared: tuple[torch.Tensor, ...] = ()  # numbers of drafts that were compared, and that matched; [Y] int32 each
    draft_ids: torch.Tensor | None = None  # [max_num_seqs, K or more] int32, the drafts by row; None: K is 0


def hold(tokens: YieldedTokens, masks: StepMasks, last: torch.Tensor) -> torch.Tensor:
    """Let each row keep at most as many tokens as it has masks for; return the rows' lengths, int64 [Y].

    A row that keeps none gets its last token as the first that it yields, where others look for its last one.

    Shapes: last [max_num_seqs, H] int32, the tokens of rows; see `raypp.ops.row_tokens`.
    """
    rows, token_ids, num_drafts = tokens.rows, tokens.token_ids, masks.draft_ids.shape[1]
    allowed, is_free = masks.num_masks, masks.num_masks == FREE
    if tokens.draft_ids is not None and num_drafts:
        is_same = tokens.draft_ids.index_select(0, rows)[:, :num_drafts] == masks.draft_ids
        allowed = torch.minimum(allowed, 1 + is_same.to(torch.int32).cumprod(1).sum(1, dtype=torch.int32))
    allowed = allowed * (tokens.positions == masks.positions)
    tokens.num_valid.copy_(torch.where(is_free, tokens.num_valid, torch.minimum(tokens.num_valid, allowed)))
    has_kept = tokens.num_valid > 0
    before = last[rows, (tokens.positions - 1) % last.shape[1]]
    token_ids[:, 0] = torch.where(has_kept, token_ids[:, 0], before)
    for count in tokens.compared:
        count.mul_(has_kept)
    return tokens.positions + tokens.num_valid

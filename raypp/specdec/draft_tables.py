"""The drafts of every row, and the row's limit, on the last stage's device: the tables behind verification."""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

import torch

from raypp.ops.row_tokens import RowTokens, StepTokens
from raypp.specdec.proposer import Drafts
from raypp.starting_rows import StartingRows


class DraftTables:
    """The next drafts of every row, how many of them count, and the row's limit."""

    def __init__(self, num_rows: int, max_drafts: int, tokens: RowTokens, device: torch.device) -> None:
        self._tokens = tokens
        self.draft_ids = torch.zeros(num_rows, max_drafts, dtype=torch.int32, device=device)
        """By row, int32 [num_rows, max_drafts]."""
        self._num_proposed = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._limits = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._uses_kernel = device.type == "cuda" and find_spec("triton") is not None

    def start(self, starting: StartingRows) -> None:
        """Take over rows that start: they have a limit, and no drafts yet."""
        self._limits.index_copy_(0, starting.rows, starting.limits)
        self._num_proposed.index_fill_(0, starting.rows, 0)

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows' drafts, [Y, K_max] int32."""
        return self.draft_ids.index_select(0, rows)

    def verify(self, rows: torch.Tensor, first: torch.Tensor, token_ids: torch.Tensor) -> Verification:
        """Verify the rows' drafts, and write the tokens into the rows' table.

        Shapes: rows, first [Y] int64, the position of each row's first token; token_ids [Y, 1 + K] int32, the model's
        own tokens.
        """
        if self._uses_kernel:
            from raypp.ops.cuda.verify_kernels import verify_and_append

            tables = (self.draft_ids, self._num_proposed, self._limits, self._tokens.table)
            return Verification(*verify_and_append(token_ids, rows, first, *tables))
        room = self._limits.index_select(0, rows) - first.to(torch.int32)
        num_proposed = self._num_proposed.index_select(0, rows)
        verified = verify_drafts(token_ids, first, self.of(rows), num_proposed, room)
        self._tokens.write(StepTokens(rows, first, token_ids))
        return verified

    def have_room(self, rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return which rows end behind all of their next drafts, bool [Y]. Shapes: rows, lengths [Y] int64."""
        return lengths + self.draft_ids.shape[1] <= self._limits.index_select(0, rows)

    def miss(self, rows: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Take over that nothing was proposed for these rows; return ids that are valid all the same, [Y, K_max] int32.

        Shapes: rows [Y] int64; token_ids [Y, 1 + K] int32.
        """
        self._num_proposed.index_fill_(0, rows, 0)
        return token_ids[:, :1].expand(-1, self.draft_ids.shape[1])

    def remember(self, rows: torch.Tensor, drafts: Drafts) -> None:
        """Take the rows' next drafts over. Shapes: rows [Y] int64."""
        self.draft_ids.index_copy_(0, rows, drafts.draft_ids)
        self._num_proposed.index_copy_(0, rows, drafts.num_proposed)


class Verification(NamedTuple):
    """How far each of Y rows got. K drafts were verified."""

    num_valid: torch.Tensor  # [Y] int32: 1 + accepted drafts, at least 1
    num_drafted: torch.Tensor  # [Y] int32: drafts that were compared; misses are none. At K = 0: the first, as a shadow
    num_matched: torch.Tensor  # [Y] int32: leading ones of these that equal the model's tokens
    lengths: torch.Tensor  # [Y] int64, of the rows, the valid tokens included


def verify_drafts(
    token_ids: torch.Tensor,
    first: torch.Tensor,
    draft_ids: torch.Tensor,
    num_proposed: torch.Tensor,
    max_valid: torch.Tensor,
) -> Verification:
    """Accept drafts up to the first that is not the model's own token.

    Shapes: token_ids [Y, 1 + K] int32, the model's tokens, each given all drafts before it; first [Y] int64, the
    position of each row's first token; draft_ids [Y, K_max] int32; num_proposed [Y] int32, leading drafts that count;
    max_valid [Y] int32, tokens that the row has room for.
    """
    num_verified = token_ids.shape[1] - 1
    if not num_verified:  # the row grows by one token, and the first draft is only looked at
        num_drafted = num_proposed.clamp(max=1)
        num_matched = (token_ids == draft_ids[:, :1]).squeeze(1) * num_drafted
        return Verification(torch.ones_like(num_drafted), num_drafted, num_matched, first + 1)
    num_drafted = num_proposed.clamp(max=num_verified)
    matches = token_ids[:, :num_verified] == draft_ids[:, :num_verified]
    matches &= torch.arange(num_verified, device=token_ids.device) < num_drafted.unsqueeze(1)
    num_matched = matches.to(torch.int32).cumprod(1).sum(1, dtype=torch.int32)
    num_valid = torch.minimum(num_matched + 1, max_valid.clamp(min=1))
    return Verification(num_valid, num_drafted, num_matched, first + num_valid)

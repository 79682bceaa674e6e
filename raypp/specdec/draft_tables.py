"""The drafts of every row, and the row's limit, on the last stage's device: the tables behind verification."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from raypp.ops.row_tokens import NewTokens, RowTokens
from raypp.specdec.proposer import Drafts
from raypp.specdec.verify import Verification, verify_drafts
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
            num_valid, num_drafted, num_matched, lengths = verify_and_append(token_ids, rows, first, *tables)
            return Verification(num_valid, num_drafted, num_matched, lengths)
        room = self._limits.index_select(0, rows) - first.to(torch.int32)
        num_proposed = self._num_proposed.index_select(0, rows)
        verified = verify_drafts(token_ids, first, self.of(rows), num_proposed, room)
        self._tokens.write(NewTokens(rows, first, token_ids))
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

"""The newest tokens of every running row, on the last stage's device: one table for all who look back.

N-grams are looked for in it; bad words, penalties of drafts and rows under a grammar read its end. The token at
position p lies in column p modulo the width. Drafts that are being judged, and what refused ones left, lie in front of
the true tokens: there is room for them, so they overwrite none that is read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from raypp.messages import StepPlan
from raypp.ops.host_to_device import to_device_together

NO_TOKEN = -2
"""Stands where there is no token: before the beginning of a sequence, where it matches no word's token, and in a list
of tokens behind the last one."""


@dataclass(frozen=True, eq=False)
class StepTokens:
    """Tokens of Y rows, one after the other in each: drafts, or what a step yields, which K drafts are verified for."""

    rows: torch.Tensor  # [Y] int64, all different, with any stride
    positions: torch.Tensor  # [Y] int64, with any stride, of each row's first token
    token_ids: torch.Tensor  # [Y, N], of a step [Y, 1 + K] int32
    num_valid: torch.Tensor | None = None  # [Y] int32, how many of them count; None: all
    lengths: torch.Tensor | None = None  # [Y] int64, of the rows, the valid tokens included; None: not found out yet
    num_drafted: torch.Tensor | None = None  # [Y] int32, see `StepResult`; None: drafts were not compared
    num_matched: torch.Tensor | None = None  # [Y] int32, likewise
    draft_ids: torch.Tensor | None = None  # [Y, K_max] int32, the next drafts
    reported_ids: torch.Tensor | None = None  # [Y, 1 + K] int32, -1 where logits were not finite; None: nowhere


class RowTokens:
    """Tokens by row, `table` int32 [num_rows, W]; never read by the host.

    Args:
        num_rows: Of the table.
        width: W; see `raypp.specdec.table_bytes.row_tokens_width`.
        device: Where it lies.
    """

    def __init__(self, num_rows: int, width: int, device: torch.device) -> None:
        self._device = device
        self.table = torch.zeros(num_rows, width, dtype=torch.int32, device=device)

    def start(self, plan: StepPlan) -> None:
        """Write the known tokens of rows that start: prompts, and after a preemption the output so far."""
        width, counts = self.table.shape[1], plan.start_num_tokens.astype(np.int64)
        ends = np.cumsum(counts)
        positions = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        places = np.repeat(plan.start_rows.astype(np.int64) * width, counts) + positions % width
        is_new = positions >= np.repeat(counts - width, counts)  # of a row's tokens in one column, the newest
        where, values = to_device_together((places[is_new], plan.start_token_ids[is_new]), self._device)
        self.table.view(-1).index_copy_(0, where, values)

    def write(self, new: StepTokens) -> None:
        """Write tokens, valid or not: those that are not lie in front of the true ones. N at most W."""
        token_ids = new.token_ids.to(torch.int32)
        places = new.positions.unsqueeze(1) + torch.arange(token_ids.shape[1], device=self._device)
        self.table[new.rows.unsqueeze(1), places % self.table.shape[1]] = token_ids

    def read(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return tokens, NO_TOKEN at positions below 0. Shapes: rows [R] int64; positions, result [R, N]."""
        token_ids = self.table[rows.unsqueeze(1), positions % self.table.shape[1]]
        return token_ids.masked_fill_(positions < 0, NO_TOKEN)

    def before(self, rows: torch.Tensor, positions: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Return the last tokens before each position, NO_TOKEN before the first one: int32 [R, num_tokens]."""
        return self.read(rows, positions.unsqueeze(1) + torch.arange(-num_tokens, 0, device=self._device))

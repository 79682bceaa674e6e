"""The last stage's table of every running row's own tokens: what n-grams are looked for in.

A row keeps its newest `window` tokens: the token at position p lies in column p mod window. When the window holds
max_model_len tokens the columns simply are the positions.
"""

from __future__ import annotations

import numpy as np
import torch

from raypp.ops.host_to_device import to_device_together
from raypp.starting_rows import StartingRows


class TokenTable:
    """Tokens of all rows, int32 [num_rows, window], on the stage's device; never read by the host."""

    def __init__(self, num_rows: int, window: int, device: torch.device) -> None:
        self._device = device
        self._window = window
        self.tokens = torch.zeros(num_rows, window, dtype=torch.int32, device=device)
        self._flat = self.tokens.view(-1)

    @property
    def num_bytes(self) -> int:
        """The bytes that it occupies."""
        return self.tokens.numel() * self.tokens.element_size()

    def start(self, starting: StartingRows) -> None:
        """Write the known tokens of rows that start: prompts, and after a preemption the output so far."""
        plan = starting.plan
        ends = np.cumsum(plan.start_num_tokens, dtype=np.int64)
        rows = np.repeat(plan.start_rows.astype(np.int64), plan.start_num_tokens)
        positions = np.arange(ends[-1]) - np.repeat(ends - plan.start_num_tokens, plan.start_num_tokens)
        token_ids = plan.start_token_ids
        in_window = positions >= np.repeat(plan.start_num_tokens, plan.start_num_tokens) - self._window
        if not in_window.all():
            rows, positions, token_ids = rows[in_window], positions[in_window], token_ids[in_window]
        columns, values = to_device_together((rows * self._window + positions % self._window, token_ids), self._device)
        self._flat.index_copy_(0, columns, values)

    def append(
        self, rows: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor, num_valid: torch.Tensor | None
    ) -> None:
        """Write the leading `num_valid` of each row's new tokens.

        Shapes: rows [R] int64, all different; positions [R] int64, of each row's first new token; token_ids [R, N]
        int32, N at most the window; num_valid [R] int32, at least 1, None where N is 1.
        """
        width = token_ids.shape[1]
        first = rows * self._window
        if width == 1:
            self._flat.index_copy_(0, (positions % self._window).add_(first), token_ids.squeeze(1))
            return
        assert num_valid is not None
        offsets = torch.arange(width, device=rows.device)
        columns = (positions.unsqueeze(1) + offsets).remainder_(self._window).add_(first.unsqueeze(1))
        # What was not accepted is written as what was there before: no data-dependent shape.
        kept = torch.where(offsets < num_valid.unsqueeze(1), token_ids, self._flat[columns])
        self._flat.index_copy_(0, columns.view(-1), kept.view(-1))

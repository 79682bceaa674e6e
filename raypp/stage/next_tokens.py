"""The token after each token of a prompt, for whoever on the last stage enters tokens with the states before them."""

from __future__ import annotations

import numpy as np
import torch

from raypp.messages import Int32s, StepPlan
from raypp.ops.host_to_device import to_device
from raypp.stage.step_shape import StepShape


class NextTokens:
    """Remembers, on the host, the known tokens of rows."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[int, Int32s] = {}

    def apply(self, plan: StepPlan) -> None:
        """Take over rows that start."""
        ends = np.cumsum(plan.start_num_tokens).tolist()
        starts = [0, *ends[:-1]]
        for row, start, end in zip(plan.start_rows.tolist(), starts, ends, strict=False):
            self._known[row] = plan.start_token_ids[start:end]

    def of(self, plan: StepPlan, shape: StepShape) -> torch.Tensor | None:
        """Return the token after each of the step's tokens where it is known, else 0, int32 [T]; None: none is."""
        first = shape.num_decode_rows
        if first == shape.num_rows:
            return None
        following = np.zeros(shape.num_tokens, np.int32)
        begin = first * shape.decode_query_len
        rows = zip(plan.rows[first:].tolist(), plan.num_computed_tokens[first:].tolist(), strict=True)
        for (row, start), count in zip(rows, shape.prefill_query_lens, strict=True):
            known = self._known[row][start + 1 : start + 1 + count]
            following[begin : begin + len(known)] = known
            begin += count
        return to_device(following, self._device)

"""The rows and tokens of a step, as far as the plan alone tells, as tensors.

Everything here is known to the host when the plan arrives, and most of it stays the same from one step of a cohort to
the next: so it is kept until the rows change. What depends on earlier steps (a decode row's length and last token) is
added on the device, see `request_rows.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from raypp.messages import Int32s, StepPlan
from raypp.ops.host_to_device import to_device_together
from raypp.ops.row_inputs import Queries


@dataclass(frozen=True, eq=False)
class StepShape:
    """Which rows a step has, and how many tokens of each.

    R rows, decode rows first; T tokens; N logits wanted; Y rows yield tokens.
    """

    num_rows: int
    num_tokens: int
    num_decode_rows: int
    decode_query_len: int  # 1 + K
    rows: torch.Tensor  # [R] int64
    rows_np: NDArray[np.int64]  # [R]
    query_start_loc: torch.Tensor  # [R + 1] int32
    token_rows: torch.Tensor  # [T] int64, each token's index into the step's rows
    logits_indices: torch.Tensor  # [N] int64, into the step's tokens: all of decode rows, the last of final chunks
    logits_row_indices: torch.Tensor  # [N] int64, of the row of each among the step's rows
    logits_rows_np: NDArray[np.int64]  # [N] the rows themselves
    samples_np: NDArray[np.bool_]  # [R]
    sampled_np: NDArray[np.int64]  # [Y], those that yield tokens, as indices into the step's rows
    sampled: torch.Tensor  # [Y] int64, the same
    sampled_rows: torch.Tensor  # [Y] int64, the rows themselves
    prefill_query_lens: list[int]

    @property
    def has_one_token_per_row(self) -> bool:
        """Whether tokens and rows are the same: by far the most frequent step."""
        return self.num_tokens == self.num_rows

    @property
    def all_sample(self) -> bool:
        """Whether every row yields a token."""
        return len(self.sampled_np) == self.num_rows

    def rows_of_logits(self) -> torch.Tensor:
        """Return the row of each token whose logits are wanted, int64 [N]. Read from `rows` at every call."""
        if self.has_one_token_per_row and self.all_sample:
            return self.rows
        return self.rows.index_select(0, self.logits_row_indices)

    @property
    def queries(self) -> Queries:
        """How many tokens each row has."""
        return Queries(self.query_start_loc, self.num_tokens, max([self.decode_query_len, *self.prefill_query_lens]))


class StepShapes:
    """The shapes of the plans that came last."""

    def __init__(self, device: torch.device, num_kept: int) -> None:
        self._device = device
        self._num_kept = num_kept
        self._kept: dict[tuple[int, int, bytes], StepShape] = {}

    def of(self, plan: StepPlan) -> StepShape:
        """Return the plan's shape; copies nothing to the device for rows that stepped before."""
        if plan.num_decode_rows < len(plan.rows):
            return self._make(plan)  # prompts do not repeat
        key = (plan.num_decode_rows, plan.num_drafts, plan.rows.tobytes())
        shape = self._kept.get(key)
        if shape is None:
            shape = self._make(plan)
            if len(self._kept) >= self._num_kept:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = shape
        return shape

    def _make(self, plan: StepPlan) -> StepShape:
        rows_np, counts = plan.rows.astype(np.int64), plan.num_scheduled_tokens
        return _shape(rows_np, counts, plan.samples, plan.num_decode_rows, 1 + plan.num_drafts, self._device)


def uniform_shape(rows: torch.Tensor, query_len: int) -> StepShape:
    """Return the shape of a decode step of the rows that `rows` will hold, int64 [R], each with `query_len` tokens."""
    num_rows = len(rows)
    unknown = np.full(num_rows, -1)  # they change from step to step
    samples, scheduled = np.ones(num_rows, np.bool_), np.full(num_rows, query_len, np.int32)
    shape = _shape(unknown, scheduled, samples, num_rows, query_len, rows.device)
    return replace(shape, rows=rows, sampled_rows=rows)


def _shape(
    rows_np: NDArray[np.int64],
    scheduled: Int32s,
    samples_np: NDArray[np.bool_],
    num_decode_rows: int,
    query_len: int,
    device: torch.device,
) -> StepShape:
    num_rows = len(rows_np)
    query_start_loc = np.zeros(num_rows + 1, np.int32)
    np.cumsum(scheduled, out=query_start_loc[1:])
    final_chunks = np.flatnonzero(samples_np[num_decode_rows:]) + num_decode_rows
    logits_indices = np.concatenate((np.arange(num_decode_rows * query_len), query_start_loc[final_chunks + 1] - 1))
    sampled_np = np.flatnonzero(samples_np)
    logits_row_indices = np.concatenate((np.repeat(np.arange(num_decode_rows), query_len), final_chunks))
    on_host: dict[str, NDArray[Any]] = {
        "rows": rows_np,
        "query_start_loc": query_start_loc,
        "token_rows": np.repeat(np.arange(num_rows), scheduled),
        "logits_indices": logits_indices,
        "logits_row_indices": logits_row_indices,
        "sampled": sampled_np,
        "sampled_rows": rows_np[sampled_np],
    }
    on_device = dict(zip(on_host, to_device_together(list(on_host.values()), device), strict=True))
    return StepShape(
        num_rows=num_rows,
        num_tokens=int(query_start_loc[-1]),
        num_decode_rows=num_decode_rows,
        decode_query_len=query_len,
        rows_np=rows_np,
        logits_rows_np=rows_np[logits_row_indices],
        samples_np=samples_np,
        sampled_np=sampled_np,
        prefill_query_lens=scheduled[num_decode_rows:].tolist(),
        **on_device,
    )

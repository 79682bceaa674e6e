"""What the plan alone says about a step's rows and tokens, as tensors.

Everything here is known to the host when the plan arrives. What depends on earlier steps (a decode row's length and
last token) is added on the device, see `request_rows.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from raypp.messages import StepPlan


@dataclass(frozen=True, eq=False)
class StepInputs:
    """A step's shape. R rows, decode rows first; T tokens; N tokens that logits are wanted of."""

    num_rows: int
    num_tokens: int
    num_decode_rows: int
    decode_query_len: int  # 1 + K
    rows: torch.Tensor  # [R] int64
    num_scheduled_tokens: torch.Tensor  # [R] int32
    query_start_loc: torch.Tensor  # [R + 1] int32
    token_rows: torch.Tensor  # [T] int64, index into the step's rows
    token_offsets: torch.Tensor  # [T] int64, index within the row's tokens of this step
    logits_indices: torch.Tensor  # [N] int64, into the step's tokens: all of decode rows, the last of final chunks
    samples_np: np.ndarray  # [R] bool
    max_decode_seq_len: int  # an upper bound over the decode rows, this step included
    prefill_query_lens: list[int]
    prefill_seq_lens: list[int]

    @property
    def max_seq_len(self) -> int:
        """An upper bound over all rows, this step included."""
        return max([self.max_decode_seq_len, *self.prefill_seq_lens])


def step_inputs(plan: StepPlan, device: torch.device) -> StepInputs:
    """Return the plan's arrays on `device`. Copies nothing on a CPU."""
    num_rows = len(plan.rows)
    num_decode_rows, query_len = plan.num_decode_rows, 1 + plan.num_drafts
    scheduled = plan.num_scheduled_tokens
    query_start_loc = np.zeros(num_rows + 1, np.int32)
    np.cumsum(scheduled, out=query_start_loc[1:])
    num_tokens = int(query_start_loc[-1])
    if num_tokens == num_rows:  # one token per row, by far the most frequent step
        token_rows = np.arange(num_rows)
        token_offsets = np.zeros(num_rows, np.int64)
    else:
        token_rows = np.repeat(np.arange(num_rows), scheduled)
        token_offsets = np.arange(num_tokens) - query_start_loc[token_rows]
    num_decode_tokens = num_decode_rows * query_len
    final_chunks = np.flatnonzero(plan.samples[num_decode_rows:]) + num_decode_rows
    logits_indices = np.concatenate((np.arange(num_decode_tokens), query_start_loc[final_chunks + 1] - 1))
    seq_lens = plan.num_computed_tokens + scheduled
    return StepInputs(
        num_rows=num_rows,
        num_tokens=num_tokens,
        num_decode_rows=num_decode_rows,
        decode_query_len=query_len,
        rows=_upload(plan.rows.astype(np.int64), device),
        num_scheduled_tokens=_upload(scheduled.copy(), device),
        query_start_loc=_upload(query_start_loc, device),
        token_rows=_upload(token_rows, device),
        token_offsets=_upload(token_offsets, device),
        logits_indices=_upload(logits_indices, device),
        samples_np=plan.samples,
        max_decode_seq_len=int(seq_lens[:num_decode_rows].max()) if num_decode_rows else 0,
        prefill_query_lens=scheduled[num_decode_rows:].tolist(),
        prefill_seq_lens=seq_lens[num_decode_rows:].tolist(),
    )


def _upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)

"""The truth about running requests, in tables indexed by row. Every stage keeps what it needs, on its own device.

All stages keep block tables and limits. The first stage also keeps what the next input of a row is: its length, last
token and drafts, fed back by the last stage. Nothing here is ever copied to the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from raypp.messages import NULL_BLOCK, StepPlan
from raypp.stage.spec import StageSpec
from raypp.stage.step_inputs import StepInputs


class BlockTables:
    """Which KV block holds which tokens of a row, and where a row must stop writing."""

    def __init__(self, spec: StageSpec, device: torch.device) -> None:
        self._block_size = spec.block_size
        self._last_index = spec.blocks_per_row - 1
        self._device = device
        self._tables = torch.full(
            (spec.max_num_seqs, spec.blocks_per_row), NULL_BLOCK, dtype=torch.int32, device=device
        )
        self._limits = torch.zeros(spec.max_num_seqs, dtype=torch.int64, device=device)

    def apply(self, plan: StepPlan) -> None:
        """Take over the rows that start and the new entries of the plan."""
        if len(plan.start_rows):
            rows = _indices(plan.start_rows, self._device)
            self._limits[rows] = _indices(plan.start_limits, self._device)
        if len(plan.block_rows):
            entries = (_indices(plan.block_rows, self._device), _indices(plan.block_positions, self._device))
            self._tables[entries] = torch.from_numpy(plan.block_ids.copy()).to(self._device)

    def gather(self, inputs: StepInputs, max_seq_len: int) -> StepBlocks:
        """Return the step's rows of the tables, wide enough for `max_seq_len` tokens."""
        width = min(-(-max_seq_len // self._block_size), self._last_index + 1)
        return StepBlocks(
            tables=self._tables[:, :width].index_select(0, inputs.rows),
            limits=self._limits.index_select(0, inputs.rows).index_select(0, inputs.token_rows),
            first_entries=inputs.token_rows * width,
            block_size=self._block_size,
        )


@dataclass(frozen=True, eq=False)
class StepBlocks:
    """The blocks of a step's rows. What it holds is known before the positions are."""

    tables: torch.Tensor  # [R, W] int32
    limits: torch.Tensor  # [T] int64, of each token's row
    first_entries: torch.Tensor  # [T] int64, where the table of each token's row begins in the flattened tables
    block_size: int

    def slot_mapping(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the KV slot of each token, int64 [T]; in the null block for positions at or past the row's limit."""
        indices = torch.div(positions, self.block_size, rounding_mode="floor").clamp_(max=self.tables.shape[1] - 1)
        blocks = self.tables.view(-1).index_select(0, indices.add_(self.first_entries))
        blocks = torch.where(positions < self.limits, blocks, NULL_BLOCK)
        return blocks * self.block_size + positions % self.block_size


class NextInputs:
    """First stage only: what the next input of each row is."""

    def __init__(self, spec: StageSpec, device: torch.device) -> None:
        self._device = device
        self._lengths = torch.zeros(spec.max_num_seqs, dtype=torch.int32, device=device)
        self._last_token_ids = torch.zeros(spec.max_num_seqs, dtype=torch.int32, device=device)
        self._draft_ids = torch.zeros(spec.max_num_seqs, spec.max_drafts, dtype=torch.int32, device=device)
        self._known_token_ids: dict[int, np.ndarray] = {}  # row -> tokens that the driver sent; host side

    def apply(self, plan: StepPlan) -> None:
        """Take over the rows that start."""
        if not len(plan.start_rows):
            return
        ends = np.cumsum(plan.start_num_tokens).tolist()
        starts = [0, *ends[:-1]]
        for row, start, end in zip(plan.start_rows.tolist(), starts, ends, strict=True):
            self._known_token_ids[row] = plan.start_token_ids[start:end]
        rows = _indices(plan.start_rows, self._device)
        self._lengths[rows] = torch.from_numpy(plan.start_num_tokens.copy()).to(self._device)

    def apply_feedback(self, rows: torch.Tensor, feedback: dict[str, torch.Tensor]) -> None:
        """Take over what an earlier step yielded for `rows` ([R] int64); see `transport.schema.feedback_schema`."""
        lengths, token_ids = feedback["length"], feedback["token_ids"]
        before = self._lengths.index_select(0, rows)
        yielded = lengths >= 0
        last = (lengths - before - 1).clamp_(0, token_ids.shape[1] - 1).to(torch.int64).unsqueeze(1)
        last_token_ids = torch.where(
            yielded, token_ids.gather(1, last).squeeze(1), self._last_token_ids.index_select(0, rows)
        )
        self._lengths.index_copy_(0, rows, torch.where(yielded, lengths, before))
        self._last_token_ids.index_copy_(0, rows, last_token_ids)
        if self._draft_ids.shape[1]:
            self._draft_ids.index_copy_(0, rows, feedback["draft_ids"])

    def num_computed_tokens(self, inputs: StepInputs, plan: StepPlan) -> torch.Tensor:
        """Return each row's tokens before this step, int32 [R]: decode rows from the table, prefill rows as planned."""
        decode = self._lengths.index_select(0, inputs.rows[: inputs.num_decode_rows]) - 1
        if inputs.num_decode_rows == inputs.num_rows:
            return decode
        planned = plan.num_computed_tokens[inputs.num_decode_rows :].copy()
        return torch.cat((decode, torch.from_numpy(planned).to(self._device)))

    def input_ids(self, inputs: StepInputs, plan: StepPlan) -> torch.Tensor:
        """Return the step's tokens, int32 [T]."""
        decode_rows = inputs.rows[: inputs.num_decode_rows]
        decode = self._last_token_ids.index_select(0, decode_rows)
        if plan.num_drafts:
            drafts = self._draft_ids.index_select(0, decode_rows)[:, : plan.num_drafts]
            decode = torch.cat((decode.unsqueeze(1), drafts), dim=1).view(-1)
        if inputs.num_decode_rows == inputs.num_rows:
            return decode
        prefill_rows = zip(
            plan.rows[inputs.num_decode_rows :].tolist(),
            plan.num_computed_tokens[inputs.num_decode_rows :].tolist(),
            inputs.prefill_query_lens,
            strict=True,
        )
        chunks = [self._known_token_ids[row][start : start + count] for row, start, count in prefill_rows]
        return torch.cat((decode, torch.from_numpy(np.concatenate(chunks)).to(self._device)))


def _indices(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int64)).to(device)

"""The truth about running requests, in tables indexed by row. Every stage keeps what it needs, on its own device.

All stages keep block tables. The first stage also keeps what the next input of a row is: its length, last
token and drafts, fed back by the last stage. Nothing here is ever copied to the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from raypp.messages import NULL_BLOCK, StepPlan
from raypp.ops.decode_inputs import DecodeInputs, NewEntries, decode_inputs
from raypp.ops.host_to_device import to_device, to_device_together
from raypp.stage.spec import StageSpec
from raypp.stage.step_shape import StepShape


class BlockTables:
    """Which KV block holds which tokens of a row.

    A row's table beyond the blocks that it owns is the null block, its last entry always. So a token at or past the
    row's limit, computed by a step that was dispatched before the row's end was known, is written behind the row's own
    tokens or into nobody's block.
    """

    def __init__(self, spec: StageSpec, device: torch.device) -> None:
        self._block_size = spec.block_size
        self._num_entries = spec.blocks_per_row + 1
        self._device = device
        self._tables = torch.full((spec.max_num_seqs, self._num_entries), NULL_BLOCK, dtype=torch.int32, device=device)
        self._gathered: dict[StepShape, StepBlocks] = {}  # since the tables last changed

    @property
    def tables(self) -> torch.Tensor:
        """All tables, int32 [max_num_seqs, W]; their address never changes."""
        return self._tables

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tables, which keep their addresses."""
        return {"block tables": self._tables}

    def decode_inputs(
        self,
        entries: NewEntries,
        rows: torch.Tensor,
        num_computed_tokens: torch.Tensor,
        *,
        query_len: int,
        max_len: int,
    ) -> DecodeInputs:
        """Write entries (`forget_gathered` belongs to it), and return what the tables say to a step of decode rows.

        From the tables as they are when it runs, so that a recording follows them; see `raypp.ops.decode_inputs`.
        """
        return decode_inputs(
            self._tables,
            entries,
            rows,
            num_computed_tokens,
            query_len=query_len,
            block_size=self._block_size,
            max_len=max_len,
        )

    def forget_gathered(self) -> None:
        """Say that the tables have changed."""
        self._gathered.clear()

    def apply(self, plan: StepPlan) -> None:
        """Take over the rows that start and the new entries of the plan."""
        if not len(plan.start_rows) and not len(plan.block_rows):
            return
        self.forget_gathered()
        indices = [each.astype(np.int64) for each in (plan.start_rows, plan.block_rows, plan.block_positions)]
        starting, rows, positions, block_ids = to_device_together([*indices, plan.block_ids], self._device)
        if len(plan.start_rows):
            # Not by an assignment: on a GPU that copies its number from ordinary memory, and so waits for the device.
            self._tables.index_fill_(0, starting, NULL_BLOCK)
        if len(plan.block_rows):
            self._tables.index_put_((rows, positions), block_ids)

    def gather(self, shape: StepShape, max_seq_len: int) -> StepBlocks:
        """Return the step's rows of the tables, wide enough for `max_seq_len` tokens."""
        width = min(-(-max_seq_len // self._block_size), self._num_entries)
        blocks = self._gathered.get(shape)
        if blocks is None or blocks.tables.shape[1] != width:
            tables = self._tables[:, :width].index_select(0, shape.rows)
            blocks = self._gathered[shape] = StepBlocks(
                tables=tables,
                first_slots=(tables.to(torch.int64) * self._block_size).view(-1),
                first_entries=shape.token_rows * width,
                block_size=self._block_size,
            )
        return blocks


@dataclass(frozen=True, eq=False)
class StepBlocks:
    """The blocks of a step's rows. What it holds is known before the positions are."""

    tables: torch.Tensor  # [R, W] int32
    first_slots: torch.Tensor  # [R * W] int64, the first slot of each of these blocks
    first_entries: torch.Tensor  # [T] int64, where the table of each token's row begins in `first_slots`
    block_size: int

    def slot_mapping(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the KV slot of each token, int64 [T]. Shapes: positions [T] int64."""
        indices = torch.div(positions, self.block_size, rounding_mode="floor").clamp_(max=self.tables.shape[1] - 1)
        return self.first_slots.index_select(0, indices.add_(self.first_entries)).add_(positions % self.block_size)


class NextInputs:
    """First stage only: what the next input of each row is."""

    def __init__(self, spec: StageSpec, device: torch.device) -> None:
        self._device = device
        self._lengths = torch.zeros(spec.max_num_seqs, dtype=torch.int32, device=device)
        self._lengths[spec.padding_row] = 1
        self._last_token_ids = torch.zeros(spec.max_num_seqs, dtype=torch.int32, device=device)
        self._draft_ids = torch.zeros(spec.max_num_seqs, spec.max_drafts, dtype=torch.int32, device=device)
        self._known_token_ids: dict[int, np.ndarray] = {}  # row -> tokens that the driver sent; host side

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tables, which keep their addresses."""
        return {"lengths": self._lengths, "last tokens": self._last_token_ids, "drafts": self._draft_ids}

    def apply(self, plan: StepPlan) -> None:
        """Take over the rows that start."""
        if not len(plan.start_rows):
            return
        ends = np.cumsum(plan.start_num_tokens).tolist()
        starts = [0, *ends[:-1]]
        for row, start, end in zip(plan.start_rows.tolist(), starts, ends, strict=True):
            self._known_token_ids[row] = plan.start_token_ids[start:end]
        rows, lengths = to_device_together((plan.start_rows.astype(np.int64), plan.start_num_tokens), self._device)
        self._lengths.index_copy_(0, rows, lengths)

    def apply_feedback(self, shape: StepShape, feedback: dict[str, torch.Tensor]) -> None:
        """Take over what an earlier step of that shape yielded; see `transport.schema.feedback_schema`."""
        lengths, token_ids = feedback["length"], feedback["token_ids"]
        last_token_ids = token_ids[:, 0]
        if shape.decode_query_len > 1:  # drafts may have been accepted: the last token counts
            before = self._lengths.index_select(0, shape.rows)
            last = (lengths - before - 1).clamp_(0, token_ids.shape[1] - 1).to(torch.int64)
            last_token_ids = token_ids.gather(1, last.unsqueeze(1)).squeeze(1)
        rows = shape.sampled_rows
        if not shape.all_sample:
            lengths, last_token_ids = (
                lengths.index_select(0, shape.sampled),
                last_token_ids.index_select(0, shape.sampled),
            )
        self._lengths.index_copy_(0, rows, lengths)
        self._last_token_ids.index_copy_(0, rows, last_token_ids)
        if self._draft_ids.shape[1]:
            self._draft_ids.index_copy_(0, rows, feedback["draft_ids"].index_select(0, shape.sampled))

    def decode_lengths(self, shape: StepShape) -> torch.Tensor:
        """Return the tokens of each decode row before this step, int32 [D]; from the tables alone."""
        return self._lengths.index_select(0, shape.rows[: shape.num_decode_rows]).sub_(1)

    def decode_input_ids(self, shape: StepShape) -> torch.Tensor:
        """Return the decode rows' tokens, int32 [D * (1 + K)]; from the tables alone."""
        decode_rows, num_drafts = shape.rows[: shape.num_decode_rows], shape.decode_query_len - 1
        decode = self._last_token_ids.index_select(0, decode_rows)
        if not num_drafts:
            return decode
        drafts = self._draft_ids.index_select(0, decode_rows)[:, :num_drafts]
        return torch.cat((decode.unsqueeze(1), drafts), dim=1).view(-1)

    def num_computed_tokens(self, shape: StepShape, plan: StepPlan) -> torch.Tensor:
        """Return each row's tokens before this step, int32 [R]: decode rows from the table, prefill rows as planned."""
        decode = self.decode_lengths(shape)
        if shape.num_decode_rows == shape.num_rows:
            return decode
        planned = plan.num_computed_tokens[shape.num_decode_rows :]
        return torch.cat((decode, to_device(planned, self._device)))

    def input_ids(self, shape: StepShape, plan: StepPlan) -> torch.Tensor:
        """Return the step's tokens, int32 [T]."""
        decode = self.decode_input_ids(shape)
        if shape.num_decode_rows == shape.num_rows:
            return decode
        prefill_rows = zip(
            plan.rows[shape.num_decode_rows :].tolist(),
            plan.num_computed_tokens[shape.num_decode_rows :].tolist(),
            shape.prefill_query_lens,
            strict=True,
        )
        chunks = [self._known_token_ids[row][start : start + count] for row, start, count in prefill_rows]
        return torch.cat((decode, to_device(np.concatenate(chunks), self._device)))

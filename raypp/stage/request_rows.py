"""The state of running requests on a stage, in tables indexed by row, on the stage's own device.

All stages keep block tables. The first stage also keeps what the next input of a row is: its length, last
token and drafts, fed back by the last stage. Nothing here is ever copied to the host.
"""

from __future__ import annotations

import numpy as np
import torch

from raypp.messages import NULL_BLOCK, Int32s, StepPlan
from raypp.ops.host_to_device import to_device, to_device_together
from raypp.ops.row_inputs import NewEntries, RowInputs, row_inputs
from raypp.stage.stage_spec import StageSpec
from raypp.stage.step_shape import StepShape
from raypp.starting_rows import StartingRows


class BlockTables:
    """Which KV block holds which tokens of a row.

    A row's table beyond the blocks that it owns is the null block, its last entry always. So a token at or past the
    row's limit, computed by a step that was dispatched before the row's end was known, is written behind the row's own
    tokens or into nobody's block.
    """

    def __init__(self, spec: StageSpec, device: torch.device) -> None:
        self._block_size = spec.block_size
        self._max_len = spec.max_seq_len
        self._device = device
        self._no_entries = NewEntries(*torch.empty(3, 0, dtype=torch.int64, device=device).unbind())
        num_entries = spec.blocks_per_row + 1
        self._tables = torch.full((spec.max_num_seqs, num_entries), NULL_BLOCK, dtype=torch.int32, device=device)

    @property
    def tables(self) -> torch.Tensor:
        """All tables, int32 [max_num_seqs, W]; their address never changes."""
        return self._tables

    def start(self, starting: StartingRows) -> None:
        """Empty the tables of rows that start."""
        # Not by an assignment: on a GPU that copies its number from ordinary memory, and so waits for the device.
        self._tables.index_fill_(0, starting.rows, NULL_BLOCK)

    def new_entries(self, plan: StepPlan) -> NewEntries:
        """Return what a plan brings to the tables, on the device."""
        if not len(plan.block_rows):
            return self._no_entries
        columns = [each.astype(np.int64) for each in (plan.block_rows, plan.block_positions, plan.block_ids)]
        return NewEntries(*to_device_together(columns, self._device))

    def inputs(self, entries: NewEntries, shape: StepShape, num_computed_tokens: torch.Tensor) -> RowInputs:
        """Write entries, and return what the tables say to a step; as they are when it runs, so recordings follow them.

        Shapes: num_computed_tokens [R] int32.
        """
        return row_inputs(
            self._tables,
            entries,
            shape.rows,
            num_computed_tokens,
            shape.queries,
            block_size=self._block_size,
            max_len=self._max_len,
        )


class NextInputs:
    """First stage only: what the next input of each row is."""

    def __init__(self, spec: StageSpec, device: torch.device) -> None:
        self._device = device
        self._lengths = torch.zeros(spec.max_num_seqs, dtype=torch.int32, device=device)
        self._lengths[spec.padding_row] = 1
        self._last_token_ids = torch.zeros(spec.max_num_seqs, dtype=torch.int32, device=device)
        self._draft_ids = torch.zeros(spec.max_num_seqs, spec.max_drafts, dtype=torch.int32, device=device)

    def start(self, starting: StartingRows) -> None:
        """Take over rows that start."""
        self._lengths.index_copy_(0, starting.rows, starting.num_tokens)

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

    def input_ids(self, shape: StepShape, of_chunks: Int32s) -> torch.Tensor:
        """Return the step's tokens, int32 [T]: those of decode rows from the tables, then those of its chunks."""
        decode = self.decode_input_ids(shape)
        return decode if not len(of_chunks) else torch.cat((decode, to_device(of_chunks, self._device)))

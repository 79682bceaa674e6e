"""The state of running requests on a stage, in tables indexed by row, on the stage's own device.

All stages keep block tables. The first stage also keeps what the next input of a row is: its length, last token and
drafts, fed back by the last stage. Nothing here is ever copied to the host.

Feedback never blocks the last stage. Each step sends exactly one message, possibly empty, into slot
`step_id mod 2 * num_stages`. Before step s goes on to the next stage, the first stage has applied every message up to
`max(requires_feedback_of, s - 2 * num_stages)` and given its slot back. So the last stage always finds its slot free,
and the ring of stages cannot deadlock, however many steps are in flight.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from raypp.messages import NO_INT32S, NULL_BLOCK, Int32s, StepPlan
from raypp.ops.host_to_device import to_device, to_device_together
from raypp.ops.row_inputs import NewEntries
from raypp.stage.stage_spec import StageSpec
from raypp.stage.step_batch import StepBatch
from raypp.starting_rows import StartingRows
from raypp.transport.edges import num_feedback_slots
from raypp.transport.link import LinkReceiver
from raypp.transport.schema import Schema


class BlockTables:
    """Which KV block holds which tokens of a row.

    A row's table beyond the blocks that it owns is the null block, its last entry always. So a token at or past the
    row's limit, computed by a step that was dispatched before the row's end was known, is written behind the row's own
    tokens or into the null block.
    """

    def __init__(self, spec: StageSpec, device: torch.device) -> None:
        self._device = device
        self._no_entries = NewEntries(*torch.empty(3, 0, dtype=torch.int64, device=device).unbind())
        num_entries = spec.blocks_per_row + 1
        self._num_rows = spec.max_num_seqs
        shape = (len(spec.groups), spec.max_num_seqs, num_entries)
        self.tables = torch.full(shape, NULL_BLOCK, dtype=torch.int32, device=device)
        """All tables, int32 [groups of layers, max_num_seqs, W]; their address never changes."""

    def start(self, starting: StartingRows) -> None:
        """Empty the tables of rows that start."""
        # Not by an assignment: on a GPU that copies its number from ordinary memory, and so waits for the device.
        self.tables.index_fill_(1, starting.rows, NULL_BLOCK)

    def new_entries(self, plan: StepPlan) -> NewEntries:
        """Return what a plan brings to the tables, on the device."""
        if not len(plan.block_rows):
            return self._no_entries
        return NewEntries(*to_device_together(self.columns(plan), self._device))

    def columns(self, plan: StepPlan) -> list[NDArray[np.int64]]:
        """Return the columns of a plan's `NewEntries`, on the host."""
        rows = plan.block_groups.astype(np.int64) * self._num_rows + plan.block_rows
        return [rows, plan.block_positions.astype(np.int64), plan.block_ids.astype(np.int64)]


class KnownTokens:
    """The tokens of running rows that the driver sent: prompts, and after a preemption the output so far. On the host.

    Kept by row, until another request takes the row over. T tokens of a step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of_rows: dict[int, Int32s] = {}

    def start(self, starting: StartingRows) -> None:
        """Take over rows that start."""
        self._of_rows.update(zip(starting.rows_np.tolist(), starting.token_ids, strict=True))

    def of_chunks(self, batch: StepBatch) -> Int32s:
        """Return the tokens of the step's chunks, one chunk after the other."""
        chunks = [known[start : start + count] for known, start, count in self._chunks(batch)]
        return np.concatenate(chunks) if chunks else NO_INT32S

    def after_each(self, batch: StepBatch) -> torch.Tensor:
        """Return the token after each of the step's tokens where it is known, else 0, int32 [T]."""
        following = np.zeros(batch.num_tokens, np.int32)
        begin = batch.num_decode_rows * batch.query_len
        for known, start, count in self._chunks(batch):
            after = known[start + 1 : start + 1 + count]
            following[begin : begin + len(after)] = after
            begin += count
        return to_device(following, self._device)

    def _chunks(self, batch: StepBatch) -> list[tuple[Int32s, int, int]]:
        """Return the known tokens of each row with a chunk, and the chunk's first position and length."""
        plan, first = batch.plan, batch.num_decode_rows
        rows, starts = plan.rows[first:].tolist(), plan.num_computed_tokens[first:].tolist()
        return [
            (self._of_rows[row], start, count)
            for row, start, count in zip(rows, starts, batch.prefill_query_lens, strict=True)
        ]


class FedBack(NamedTuple):
    """A step that is fed back, and the rows of its message: those of the step, then padding."""

    step_id: int
    batch: StepBatch
    num_message_rows: int


class NextInputs:
    """First stage only: what the next input of each row is, and the feedback that changes it, in step order.

    Args:
        spec: The first stage's.
        device: Its device.
        known_tokens: Of its rows.
        receiver: Where feedback arrives, one message per step.
        schema: Of the messages; see `transport.schema.feedback_schema`.
    """

    def __init__(
        self, spec: StageSpec, device: torch.device, known_tokens: KnownTokens, receiver: LinkReceiver, schema: Schema
    ) -> None:
        self._device = device
        self._known_tokens = known_tokens
        self._receiver = receiver
        self._schema = schema
        self._num_slots = num_feedback_slots(spec.num_stages)
        self._expected: deque[FedBack] = deque()
        self._lengths = torch.zeros(spec.max_num_seqs, dtype=torch.int32, device=device)
        self._lengths[spec.padding_row] = 1
        self._last_token_ids = torch.zeros(spec.max_num_seqs, dtype=torch.int32, device=device)
        self._draft_ids = torch.zeros(spec.max_num_seqs, spec.max_drafts, dtype=torch.int32, device=device)

    def start(self, starting: StartingRows) -> None:
        """Take over rows that start."""
        self._lengths.index_copy_(0, starting.rows, starting.num_tokens)

    def take_feedback(self, batch: StepBatch) -> FedBack | None:
        """Apply, in order, all feedback that a step builds on, and what would else hold the slot that it needs.

        The newest message is left to a full graph, if it has that many rows. It is there, in its slot, until `release`.
        The step's own message is expected from now on.

        Returns:
            What was left to the step; None: nothing.
        """
        plan, num_rows = batch.plan, batch.size.message[0]
        until = max(plan.requires_feedback_of, plan.step_id - self._num_slots)
        due = []
        while self._expected and self._expected[0].step_id <= until:
            due.append(self._expected.popleft())
        left = None
        if due and batch.is_full_graph and due[-1].num_message_rows == num_rows:
            left = due.pop()
        for fed_back in due:
            self._apply(fed_back)
        if left is not None:
            self._receiver.wait(left.step_id)
        self._expected.append(FedBack(plan.step_id, batch, num_rows))
        self._receiver.post_recv(plan.step_id, self._schema.num_bytes(num_rows, num_rows))
        return left

    def release(self, fed_back: FedBack) -> None:
        """Give the slot of a message back that was left to a step, once the step that reads it was queued."""
        self._receiver.release(fed_back.step_id)

    def apply(self, batch: StepBatch, feedback: dict[str, torch.Tensor]) -> None:
        """Take over what an earlier step of that batch yielded; see `transport.schema.feedback_schema`."""
        lengths, token_ids = feedback["length"], feedback["token_ids"]
        last_token_ids = token_ids[:, 0]
        if batch.query_len > 1:  # drafts may have been accepted: the last token counts
            before = self._lengths.index_select(0, batch.rows)
            last = (lengths - before - 1).clamp_(0, token_ids.shape[1] - 1).to(torch.int64)
            last_token_ids = token_ids.gather(1, last.unsqueeze(1)).squeeze(1)
        if not batch.all_sample:
            lengths, last_token_ids = (each.index_select(0, batch.sampled) for each in (lengths, last_token_ids))
        self._lengths.index_copy_(0, batch.sampled_rows, lengths)
        self._last_token_ids.index_copy_(0, batch.sampled_rows, last_token_ids)
        if self._draft_ids.shape[1]:
            draft_ids = feedback["draft_ids"].index_select(0, batch.sampled)
            self._draft_ids.index_copy_(0, batch.sampled_rows, draft_ids)

    def of_step(self, batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each row's tokens before a step, int32 [R], and the step's token ids, int32 [T].

        Those of decode rows come from the tables, those of prefill rows from the host.
        """
        decode_rows, num_drafts = batch.rows[: batch.num_decode_rows], batch.query_len - 1
        computed = self._lengths.index_select(0, decode_rows).sub_(1)
        token_ids = self._last_token_ids.index_select(0, decode_rows)
        if num_drafts:
            drafts = self._draft_ids.index_select(0, decode_rows)[:, :num_drafts]
            token_ids = torch.cat((token_ids.unsqueeze(1), drafts), dim=1).view(-1)
        if not batch.is_decode:
            planned = batch.plan.num_computed_tokens[batch.num_decode_rows :]
            computed = torch.cat((computed, to_device(planned, self._device)))
            token_ids = torch.cat((token_ids, to_device(self._known_tokens.of_chunks(batch), self._device)))
        return computed, token_ids

    def _apply(self, fed_back: FedBack) -> None:
        step_id, batch, num_rows = fed_back
        batch.upload(self._device)
        feedback = self._schema.views(self._receiver.wait(step_id), num_rows, num_rows)
        if num_rows > batch.num_rows:
            feedback = {name: column[: batch.num_rows] for name, column in feedback.items()}
        self.apply(batch, feedback)
        self._receiver.release(step_id)

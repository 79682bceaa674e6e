"""The batch of a step: its rows and tokens, how it runs, and what it is padded to.

What the host knows of a batch follows from the plan and stays the same from one step of a cohort to the next: so a
batch is kept until the rows change, and its tensors are copied to the device when a step first needs them. What depends
on earlier steps (a decode row's length and last token) is added on the device, see `request_rows.py`.

A CUDA graph has a batch of its own, whose rows are all padding: its tensors are buffers at fixed addresses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from raypp.messages import Int32s, StepForm, StepPlan
from raypp.models.decoder import Deepstack
from raypp.ops.attention import AttentionBatch
from raypp.ops.host_to_device import to_device_together
from raypp.ops.row_inputs import NewEntries, Queries
from raypp.row_params import Needs
from raypp.specdec.proposer import StepHidden
from raypp.stage.step_sizes import FullSize, StepSize, full_graph_size


@dataclass(frozen=True)
class ItemPart:
    """The part of an item whose tokens a step computes."""

    key: bytes
    start: int  # of the item's tokens
    end: int  # exclusive


@dataclass(frozen=True, eq=False)
class StepItems:
    """The tokens of a step that stand for images. M of them."""

    token_indices: torch.Tensor  # [M] int64, ascending
    parts: tuple[ItemPart, ...]  # whose they are, in order


class StepBatch:
    """R rows, decode rows first; T tokens; N logits wanted; Y rows yield tokens. Most fields are set once."""

    def __init__(
        self,
        rows_np: NDArray[np.int64],
        num_scheduled_tokens: Int32s,
        samples_np: NDArray[np.bool_],
        num_decode_rows: int,
        query_len: int,
    ) -> None:
        """Note what the plan says.

        Args:
            rows_np: [R].
            num_scheduled_tokens: [R].
            samples_np: [R] whether the row yields tokens.
            num_decode_rows: The first of them.
            query_len: 1 + K, the tokens of each decode row.
        """
        num_rows = len(rows_np)
        query_start_loc = np.zeros(num_rows + 1, np.int32)
        np.cumsum(num_scheduled_tokens, out=query_start_loc[1:])
        self.num_rows = num_rows
        self.num_tokens = int(query_start_loc[-1])
        self.num_decode_rows = num_decode_rows
        self.query_len = query_len
        self.prefill_query_lens: list[int] = num_scheduled_tokens[num_decode_rows:].tolist()
        self.rows_np = rows_np
        self.samples_np = samples_np
        self.sampled_np = np.flatnonzero(samples_np)
        """[Y] the rows that yield tokens, as indices into the step's rows."""
        self.is_decode = num_decode_rows == num_rows
        self.all_sample = len(self.sampled_np) == num_rows
        self.has_one_token_per_row = self.num_tokens == num_rows
        final_chunks = np.flatnonzero(samples_np[num_decode_rows:]) + num_decode_rows
        logits_row_indices = np.concatenate((np.repeat(np.arange(num_decode_rows), query_len), final_chunks))
        self.logits_rows_np = rows_np[logits_row_indices]
        """[N] the row of each token whose logits are wanted: all of decode rows, the last of final chunks."""
        self._on_host: list[NDArray[Any]] = [
            rows_np,
            query_start_loc,
            np.repeat(np.arange(num_rows), num_scheduled_tokens),
            np.concatenate((np.arange(num_decode_rows * query_len), query_start_loc[final_chunks + 1] - 1)),
            logits_row_indices,
            self.sampled_np,
            rows_np[self.sampled_np],
        ]
        self.needs: Needs | None = None
        """What the rows that yield ask of the sampler; None: not found out yet."""

        # On the device, after `upload`.
        self.rows: torch.Tensor  # [R] int64
        self.token_rows: torch.Tensor  # [T] int64, each token's index into the step's rows
        self.logits_indices: torch.Tensor  # [N] int64, into the step's tokens
        self.logits_row_indices: torch.Tensor  # [N] int64, of the row of each among the step's rows
        self.sampled: torch.Tensor  # [Y] int64, `sampled_np`
        self.sampled_rows: torch.Tensor  # [Y] int64, the rows themselves
        self.queries: Queries

        # Of the step that has these rows now.
        self.plan: StepPlan
        self.size: StepSize
        self.is_full_graph = False  # whether one CUDA graph is the whole step
        self.entries: NewEntries
        self.items: StepItems | None = None
        self.received: Mapping[str, torch.Tensor] = {}  # the message of the stage before; none on the first stage
        self.drafting_tokens: torch.Tensor | None = None  # int64, those whose states travel to a draft head; None: all
        self.num_computed_tokens: torch.Tensor  # [R] int32, before the step
        self.positions: torch.Tensor  # [T] int64
        self.rope_positions: torch.Tensor  # [T] int64, or [T, 3] along axes
        self.attention: AttentionBatch
        self.deepstack: Deepstack | None = None

    def upload(self, device: torch.device) -> None:
        """Bring to the device what is not there."""
        if not self._on_host:
            return
        self.rows, starts, self.token_rows, self.logits_indices, self.logits_row_indices, *sampled = to_device_together(
            self._on_host, device
        )
        self.sampled, self.sampled_rows = sampled
        self.queries = Queries(starts, self.num_tokens, max([self.query_len, *self.prefill_query_lens]))
        self._on_host = []

    def drop_inputs(self) -> None:
        """Let go of what the layers read: a kept batch keeps no memory of a step, nor what graphs may use again."""
        del self.num_computed_tokens, self.positions, self.rope_positions, self.attention
        self.received, self.items, self.deepstack, self.drafting_tokens = {}, None, None, None

    def rows_of_logits(self) -> torch.Tensor:
        """Return the row of each token whose logits are wanted, int64 [N]. Read from `rows` at every call."""
        if self.has_one_token_per_row and self.all_sample:
            return self.rows
        return self.rows.index_select(0, self.logits_row_indices)


@dataclass(frozen=True, eq=False)
class LastHidden:
    """What the layers of the last stage gave. N tokens have a successor to be chosen."""

    logits: torch.Tensor  # [N, V]
    positions: torch.Tensor  # [N] int64, of the tokens that are chosen
    hidden: StepHidden  # of all tokens of the step


class StepBatches:
    """The batches of the plans that came last."""

    def __init__(self, num_kept: int) -> None:
        self._num_kept = num_kept
        self._kept: dict[tuple[int, int, bytes], StepBatch] = {}

    def of(self, plan: StepPlan, size: StepSize) -> StepBatch:
        """Return the plan's batch; the same one for rows that decoded before."""
        key = (plan.num_decode_rows, plan.num_drafts, plan.rows.tobytes())
        batch = self._kept.get(key)
        if batch is None:
            rows, counts = plan.rows.astype(np.int64), plan.num_scheduled_tokens
            batch = StepBatch(rows, counts, plan.samples, plan.num_decode_rows, 1 + plan.num_drafts)
            if batch.is_decode:  # prompts do not repeat
                if len(self._kept) >= self._num_kept:
                    del self._kept[next(iter(self._kept))]
                self._kept[key] = batch
        batch.plan, batch.size, batch.is_full_graph = plan, size, size.form is StepForm.FULL_GRAPH
        return batch

    def note_started(self) -> None:
        """Take in that rows have new owners."""
        for batch in self._kept.values():
            batch.needs = None


def graph_batch(rows: torch.Tensor, query_len: int) -> StepBatch:
    """Return the batch of a decode step of the rows that `rows` will hold, int64 [R], each with `query_len` tokens."""
    num_rows = len(rows)
    unknown = np.full(num_rows, -1)  # they change from step to step
    samples, scheduled = np.ones(num_rows, np.bool_), np.full(num_rows, query_len, np.int32)
    batch = StepBatch(unknown, scheduled, samples, num_rows, query_len)
    batch.upload(rows.device)
    batch.rows = batch.sampled_rows = rows
    batch.size = full_graph_size(FullSize(num_rows, query_len - 1))
    return batch

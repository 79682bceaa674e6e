"""The last stage's masks: which tokens the grammars of its rows allow next, as far as the driver has told.

    reader thread: MaskUpdate -> one place per row        stage's thread: a step's masks -> a buffer on the device

A mask names the position and the drafts that it is for, and the device compares: so a row is never held to a mask of
another moment. A row whose mask is missing yields nothing and tries again in its next step, which costs its own text
one step and everybody else nothing. So a step waits for masks only while its own layers still run, and for as long as
the plan allows, which is while nobody runs who has no grammar.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from raypp.members import Members
from raypp.messages import NO_STEP, Int32s, Int64s, MaskMoment, MaskUpdate
from raypp.ops.sample.tables import FREE, PositionMasks, StepMasks
from raypp.stage.stage_spec import StageSpec
from raypp.stage.step_batch import StepBatch
from raypp.starting_rows import StartingRows

_MAX_LAYOUTS = 64
_LOOK_AGAIN_S = 0.0002
"""How often a waiting stage asks the device whether the step's layers are through."""


@dataclass(frozen=True, eq=False)
class _Layout:
    """Where G rows under a grammar are in a step; K drafts."""

    rows_np: NDArray[np.int64]  # [G]
    yielding_np: NDArray[np.int64]  # [G] indices into the rows that the sampler chooses for
    most_masks: Int64s  # [G] tokens that the row may yield
    columns: NDArray[np.int64]  # [1 + K]
    logit_indices: NDArray[np.int64]  # [G, 1 + K] of the row's positions among the step's logits
    num_drafts: int  # K


class GrammarMasks:
    """One place per row. W words of a bit mask, K_max drafts."""

    def __init__(self, spec: StageSpec, device: torch.device, members: Members | None = None) -> None:
        rows, self._members = spec.max_num_seqs, members
        self._device = device
        self._shape = (rows, 1 + spec.max_drafts, -(-spec.vocab_size // 32))
        # Of the rows themselves.
        self._has_grammar = np.zeros(rows, np.bool_)
        self._start_steps = np.full(rows, NO_STEP, np.int64)
        self._last_steps = np.full(rows, NO_STEP, np.int64)  # the newest that may have brought the row tokens
        self._is_late = np.zeros(rows, np.bool_)  # its last mask did not come in time
        # Of their newest masks, see `MaskMoment`. The masks themselves appear with the first of them.
        self._changed = threading.Condition()
        self._moments = np.full((rows, len(MaskMoment)), NO_STEP, np.int64)
        self._moments[:, MaskMoment.NUM_MASKS] = 0
        self._mask_draft_ids = np.full((rows, spec.max_drafts), -1, np.int32)
        self._bitmasks: Int32s | None = None  # [rows, 1 + K_max, W]
        self._layouts: dict[StepBatch, _Layout] = {}
        # On the device, what is said of a step's rows and positions, `_PARTS`, and then the masks themselves.
        most_rows, most_positions = spec.max_step_rows, spec.max_step_rows * (1 + spec.max_drafts)
        self._part_lens = (most_rows, most_rows, most_rows * spec.max_drafts, most_positions)
        self._header_len = sum(self._part_lens)
        self._most_masks = most_positions
        self._buffer: torch.Tensor | None = None
        self.is_neutral = True
        """Whether the buffer says of all rows that they are free."""

    def put(self, update: MaskUpdate) -> None:
        """Take masks in; each row at most once. From any thread."""
        with self._changed:
            if self._bitmasks is None:
                self._bitmasks = np.full(self._shape, -1, np.int32)
            starts = self._moments[update.rows, MaskMoment.START_STEP]
            is_current = update.moments[:, MaskMoment.START_STEP] >= starts
            if is_current.all():
                self._moments[update.rows] = update.moments
            else:  # a row has changed hands meanwhile
                self._moments[update.rows[is_current]] = update.moments[is_current]
            if len(update.bitmasks) == len(update.rows) and is_current.all():
                self._bitmasks[update.rows, 0] = update.bitmasks
            else:
                self._put_by_place(self._bitmasks, update, is_current)
            self._changed.notify_all()

    def _put_by_place(self, bitmasks: Int32s, update: MaskUpdate, is_current: NDArray[np.bool_]) -> None:
        """Take in the masks and drafts of the rows that are current, some with masks behind drafts."""
        rows, counts = update.rows, update.moments[:, MaskMoment.NUM_MASKS]
        mask_rows = np.repeat(np.arange(len(rows)), counts)
        places = np.arange(len(mask_rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        is_taken = is_current[mask_rows]
        bitmasks[rows[mask_rows[is_taken]], places[is_taken]] = update.bitmasks[is_taken]
        is_behind_draft = places > 0  # one draft before each of these, in their order
        is_taken = is_taken[is_behind_draft]
        draft_rows, draft_places = mask_rows[is_behind_draft][is_taken], places[is_behind_draft][is_taken] - 1
        self._mask_draft_ids[rows[draft_rows], draft_places] = update.draft_ids[is_taken]

    def start(self, starting: StartingRows) -> None:
        """Take over rows that start."""
        self._layouts.clear()
        self._has_grammar[starting.rows_np] = False
        step_id, rows = starting.plan.step_id, starting.rows_np[starting.params["has_grammar"] > 0]
        if not len(rows):
            return
        self._has_grammar[rows] = True
        self._is_late[rows] = False
        self._start_steps[rows] = step_id
        self._last_steps[rows] = step_id - 1

    def of_step(self, batch: StepBatch, mark_body: Callable[[], Callable[[], bool]]) -> StepMasks:
        """Return the masks of a step with rows under a grammar, padding included, valid until the next step.

        Waits as long as it may, see above.

        Args:
            batch: The step.
            mark_body: See `body_mark`.
        """
        layout, plan = self._layout_of(batch), batch.plan

        def staged() -> torch.Tensor:
            rows, is_body_done = layout.rows_np, mark_body()
            with self._changed:
                moments = self._await(rows, plan.max_mask_wait_us / 1e6, is_body_done)
                num_masks = np.minimum(moments[:, MaskMoment.NUM_MASKS], layout.most_masks)
                num_masks *= moments[:, MaskMoment.START_STEP] == self._start_steps[rows]
                return self._stage(layout, moments[:, MaskMoment.POSITION], num_masks)

        # Which masks came in time depends on a clock: the first member's counts for all.
        there = staged() if self._members is None else self._members.from_first(staged)
        self._on_device()[: len(there)].copy_(there, non_blocking=True)
        self.is_neutral = False
        self._last_steps[layout.rows_np] = plan.step_id
        num_yielding, num_positions = len(batch.sampled_np), len(batch.logits_rows_np)
        if batch.is_full_graph:  # with padding
            num_yielding, num_positions = batch.size.message[:2]
        return self.of_places(num_yielding, num_positions, layout.num_drafts)

    def of_places(self, num_yielding: int, num_positions: int, num_drafts: int) -> StepMasks:
        """Return the buffer's masks of so many rows and positions, at addresses that never change."""
        buffer = self._on_device()
        counts, positions, draft_ids, mask_of = buffer[: self._header_len].split(self._part_lens)
        return StepMasks(
            num_masks=counts[:num_yielding],
            positions=positions[:num_yielding],
            draft_ids=draft_ids.view(len(counts), -1)[:num_yielding, :num_drafts],
            of_positions=PositionMasks(mask_of[:num_positions], buffer[self._header_len :].view(-1, self._shape[2])),
        )

    def _on_device(self) -> torch.Tensor:
        if self._buffer is None:
            num_words = self._header_len + self._most_masks * self._shape[2]
            self._buffer = torch.full((num_words,), FREE, dtype=torch.int32, device=self._device)
        return self._buffer

    def _stage(self, layout: _Layout, positions: Int64s, num_masks: Int64s) -> torch.Tensor:
        """Return what is known of a step's rows under a grammar; of all others, that they are free. With the lock."""
        is_there = layout.columns < num_masks[:, None]
        mask_rows, mask_places = np.repeat(layout.rows_np, num_masks), np.nonzero(is_there)[1]
        width, num_words = self._shape[2], self._header_len + len(mask_rows) * self._shape[2]
        staged = torch.empty(num_words, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        staged_np: Int32s = staged.numpy()
        header = staged_np[: self._header_len]
        header.fill(FREE)
        of_counts, of_positions, of_drafts, mask_of = np.split(header, np.cumsum(self._part_lens)[:-1])
        of_counts[layout.yielding_np] = num_masks
        of_positions[layout.yielding_np] = positions
        of_drafts.reshape(len(of_counts), -1)[layout.yielding_np] = self._mask_draft_ids[layout.rows_np]
        mask_of[layout.logit_indices[is_there]] = np.arange(len(mask_rows))
        if self._bitmasks is not None:
            masks = staged_np[self._header_len :].reshape(-1, width)
            # A view of the rows' places: one step of indexing, with no copy in between.
            places = self._bitmasks.reshape(-1, width)
            np.take(places, mask_rows * self._shape[1] + mask_places, axis=0, out=masks, mode="clip")
        return staged

    def make_neutral(self) -> None:
        """Say of all rows that they are free: full graphs look at the buffer in every step."""
        self._on_device()[: self._header_len].fill_(FREE)
        self.is_neutral = True

    def _layout_of(self, batch: StepBatch) -> _Layout:
        """Return where the rows under a grammar are in a step. Kept until rows change."""
        layout = self._layouts.get(batch)
        if layout is None:
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts.clear()
            yielding_rows = batch.rows_np[batch.sampled_np]
            indices = np.flatnonzero(self._has_grammar[yielding_rows])
            width, num_decode_rows = batch.query_len, batch.num_decode_rows
            is_decode = indices < num_decode_rows
            first_logits = np.where(is_decode, indices * width, num_decode_rows * (width - 1) + indices)
            columns = np.arange(width)
            layout = self._layouts[batch] = _Layout(
                rows_np=yielding_rows[indices],
                yielding_np=indices,
                most_masks=np.where(is_decode, width, 1),
                columns=columns,
                logit_indices=first_logits[:, None] + columns,
                num_drafts=width - 1,
            )
        return layout

    def _await(self, rows: NDArray[np.int64], wait_s: float, is_body_done: Callable[[], bool]) -> Int64s:
        """Wait for fresh masks of the rows, as long as it may be; return their moments, [G, 4]. With the lock."""
        moments = self._moments[rows]
        if not wait_s and is_body_done():
            return moments  # nobody is to wait, so it does not matter who is late
        is_fresh = self._are_fresh(rows, moments)
        if not is_fresh.all():
            ends_s = time.monotonic() + wait_s
            # Nobody waits again and again for a grammar that takes long: one late mask, and its row is on its own.
            is_patient = ~self._is_late[rows]
            while not is_fresh.all():
                left_s = ends_s - time.monotonic() if (is_patient & ~is_fresh).any() else 0.0
                if left_s <= 0 and is_body_done():
                    break
                self._changed.wait(max(left_s, _LOOK_AGAIN_S))
                moments = self._moments[rows]
                is_fresh = self._are_fresh(rows, moments)
        self._is_late[rows] = ~is_fresh
        return moments

    def _are_fresh(self, rows: NDArray[np.int64], moments: Int64s) -> NDArray[np.bool_]:
        is_own = moments[:, MaskMoment.START_STEP] == self._start_steps[rows]
        is_fresh: NDArray[np.bool_] = is_own & (moments[:, MaskMoment.AFTER_STEP] >= self._last_steps[rows])
        return is_fresh


def body_mark(device: torch.device) -> Callable[[], Callable[[], bool]]:
    """Return what marks this moment in the device's order of work, and then says whether the device has come so far."""

    def mark() -> Callable[[], bool]:
        if device.type == "cpu":
            return lambda: True  # calls return when the work is done
        queued = torch.cuda.Event()
        queued.record()
        return queued.query

    return mark

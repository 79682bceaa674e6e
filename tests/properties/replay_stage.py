"""A pipeline of stages reduced to what a scheduler can get wrong: it replays plans and checks every token it reads.

Like the real first stage it takes feedback in as late as the plans allow, so a plan that asks for too little feedback,
or gives a row away too early, computes with a wrong token here. Its KV holds, in each slot, a hash of all tokens up to
there, so a block that was freed too early, shared wrongly, or never sent makes a history differ from the truth.
So does one that was overwritten before it was copied to CPU memory, or read before it came back. Copies happen just
before the plan's step, and might as well have happened right after the step that they have to wait for. A snapshot of a
row's states is where the checkpoint stands, and all histories up to the row's end.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from raypp.messages import (
    NO_BYTES,
    NO_STEP,
    NULL_BLOCK,
    BlockCopies,
    Bytes,
    StateCopies,
    StepLogprobs,
    StepPlan,
    StepResult,
    pack,
    pack_inside,
    unpack,
)
from raypp.request import Request
from raypp.scheduler.limits import STEPS_PER_COHORT, SchedulerLimits

VOCAB_SIZE = 13
ROOT = 0


def extend(history: int, token_id: int) -> int:
    return hash((history, token_id))


def next_token(history: int, seed: int) -> int:
    return hash((history, seed, "next")) % VOCAB_SIZE


def reference_output(request: Request, limit: int) -> list[int]:
    """Return what the request must generate, from its prompt alone."""
    history, output, params = ROOT, [], request.params
    for token_id in request.prompt_token_ids.tolist():
        history = extend(history, token_id)
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else request.eos_token_ids)
    while len(request.prompt_token_ids) + len(output) < limit:
        output.append(next_token(history, request.seed))
        if output[-1] in ends:
            break
        history = extend(history, output[-1])
    return output


Snapshot = tuple[int, list[int]]
"""Where a row's checkpoint stands, and its histories."""


@dataclass
class ReplayRow:
    """A row of the stages' tables, and beside it what is true."""

    length: int = 0
    last_token_id: int = -1
    draft_ids: list[int] = field(default_factory=list)
    known: list[int] = field(default_factory=list)
    limit: int = 0
    seed: int = 0
    has_grammar: bool = False
    num_logprobs: int = -1
    num_prompt_logprobs: int = -1
    prompt_len: int = 0
    table: dict[tuple[int, int], int] = field(default_factory=dict)  # by group and index
    checkpoint: int = 0  # of its states
    histories: list[int] = field(default_factory=list)  # truth: after each token
    token_ids: list[int] = field(default_factory=list)  # truth

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.histories.append(extend(self.histories[-1] if self.histories else ROOT, token_id))


class ReplayStage:
    """Executes submitted plans one by one, in order."""

    def __init__(self, limits: SchedulerLimits, rng: random.Random, *, caps_at_limit: bool) -> None:
        self._limits = limits
        self._rng = rng
        self._caps_at_limit = caps_at_limit  # whether a row at its limit yields nothing, or tokens to be dropped
        self._rows = [ReplayRow() for _ in range(limits.max_num_seqs)]
        self._kv: dict[tuple[int, int, int], int] = {}  # by group, block and offset
        self._cpu_kv: dict[tuple[int, int], list[int | None]] = {}
        self._snapshots: dict[int, Snapshot] = {}
        self._cpu_snapshots: dict[int, Snapshot] = {}
        self._touched: dict[tuple[int, int], int] = {}  # by group and block: the last step that read or wrote it
        self._step_id = NO_STEP
        self.num_ahead = 0  # copies in, without a row that starts with the plan and has the block
        self._feedback: deque[tuple[int, list[tuple[int, int, list[int], list[int]]]]] = deque()
        self.submitted: deque[StepPlan] = deque()

    def submit(self, plan: StepPlan) -> None:
        self.submitted.append(unpack(StepPlan, pack(plan)))

    def step(self) -> StepResult:
        """Execute the oldest plan and return its result."""
        plan = self.submitted.popleft()
        self._apply_feedback(max(plan.requires_feedback_of, plan.step_id - 2 * self._limits.num_stages))
        if len(plan.block_copies):
            self._copy(unpack(BlockCopies, plan.block_copies.data))
        self._save_states(plan)
        self._apply_deltas(plan)
        self._restore_states(plan)
        if len(plan.block_copies):
            copies = unpack(BlockCopies, plan.block_copies.data)
            of_plan = set(zip(plan.block_groups.tolist(), plan.block_ids.tolist(), strict=True))
            self.num_ahead += len(
                set(zip(copies.in_groups.tolist(), copies.in_block_ids.tolist(), strict=True)) - of_plan
            )
        self._step_id = plan.step_id
        inputs = [self._inputs(plan, index) for index in range(len(plan.rows))]
        for row, start, _ in inputs:  # before anything is written: nobody reads what this same step computes
            self._check_history(self._rows[row], start)
        for index, (row, start, token_ids) in enumerate(inputs):
            self._write(self._rows[row], start, token_ids)
            known = start if index < plan.num_decode_rows else start + len(token_ids) - 1
            self._rows[row].checkpoint = known // self._limits.block_size * self._limits.block_size
        width = 1 + plan.num_drafts
        result_ids = np.full((len(plan.rows), width), -1, np.int32)
        num_valid = np.zeros(len(plan.rows), np.int32)
        num_drafted = np.zeros(len(plan.rows), np.int32)
        num_drafted[: plan.num_decode_rows] = plan.num_drafts
        num_matched = np.zeros(len(plan.rows), np.int32)
        feedback = []
        for index, (row_index, _, token_ids) in enumerate(inputs):
            row, new = self._rows[row_index], []
            if plan.samples[index]:
                new = self._sample(row, token_ids[1:] if index < plan.num_decode_rows else [])
                if row.has_grammar and self._rng.random() < 0.3:  # its mask came too late
                    feedback.append((row_index, len(row.token_ids), row.token_ids[-1:], self._draft(row)))
                    continue
            for token_id in new:
                row.append(token_id)
            result_ids[index, : len(new)] = new
            num_valid[index] = len(new)
            num_matched[index] = max(len(new) - 1, 0)
            feedback.append((row_index, len(row.token_ids) if new else -1, new, self._draft(row)))
        self._feedback.append((plan.step_id, feedback))
        logprobs = self._logprobs(plan, inputs, result_ids)
        return unpack(
            StepResult, pack(StepResult(plan.step_id, result_ids, num_valid, num_drafted, num_matched, logprobs))
        )

    def _logprobs(self, plan: StepPlan, inputs: list[tuple[int, int, list[int]]], result_ids: np.ndarray) -> Bytes:
        """Report for every token a number that only its place and its value explain."""
        rows = [self._rows[row_index] for row_index, _, _ in inputs]
        asking = [i for i, row in enumerate(rows) if row.num_logprobs >= 0 and plan.samples[i]]
        token_ids = [t for i in asking for t in result_ids[i][: None if i < plan.num_decode_rows else 1].tolist()]
        prompts = []
        for index in range(plan.num_decode_rows, len(rows)):
            row, (_, start, chunk) = rows[index], inputs[index]
            scored = row.known[start + 1 : min(start + len(chunk) + 1, row.prompt_len)]
            if row.num_prompt_logprobs >= 0 and scored:
                prompts.append((index, start + 1, scored))
        if not asking and not prompts:
            return NO_BYTES
        width = 1 + max([rows[i].num_logprobs for i in asking], default=0)
        prompt_width = 1 + max([rows[i].num_prompt_logprobs for i, _, _ in prompts], default=0)
        prompt_ids = [t for _, _, scored in prompts for t in scored]
        positions = [start + offset for _, start, scored in prompts for offset in range(len(scored))]
        return pack_inside(
            StepLogprobs(
                indices=np.array(asking, np.int32),
                token_ids=_columns(token_ids, width),
                logprobs=_columns(token_ids, width).astype(np.float32) / 2,
                ranks=np.array(token_ids, np.int32) + 1,
                prompt_indices=np.array([index for index, _, _ in prompts], np.int32),
                prompt_starts=np.array([start for _, start, _ in prompts], np.int32),
                prompt_counts=np.array([len(scored) for _, _, scored in prompts], np.int32),
                prompt_token_ids=_columns(prompt_ids, prompt_width),
                prompt_logprobs=_columns(positions, prompt_width).astype(np.float32),
                prompt_ranks=np.array(positions, np.int32) + 1,
            )
        )

    def _copy(self, copies: BlockCopies) -> None:
        assert copies.after_step <= self._step_id, "copies wait for a step behind them"
        of_out = [(copies.out_groups, copies.out_cpu_block_ids), (copies.out_groups, copies.out_block_ids)]
        of_back = [(copies.in_groups, copies.in_block_ids), (copies.in_groups, copies.in_cpu_block_ids)]
        out, back = (
            dict(zip(*(list(zip(*(each.tolist() for each in pair), strict=True)) for pair in pairs), strict=True))
            for pairs in (of_out, of_back)
        )
        assert len(out) == len(copies.out_block_ids)
        assert len(back) == len(copies.in_block_ids)
        num_groups = len(self._limits.groups)
        places = [group.num_cpu_blocks for group in self._limits.groups] + [self._limits.num_cpu_snapshots]
        assert all(block < places[group] for group, block in [*out, *back.values()])
        for group, block in [*out.values(), *back]:
            if group < num_groups:
                assert 0 < block < self._limits.groups[group].num_blocks
            else:
                assert 0 <= block < self._limits.num_snapshots
            assert self._touched.get((group, block), NO_STEP) <= copies.after_step, "a copy does not wait for its block"
        for (_, place), (_, snapshot) in [pair for pair in out.items() if pair[0][0] == num_groups]:
            self._cpu_snapshots[place] = self._snapshots.pop(snapshot)  # nobody may read it any more
        for (_, snapshot), (_, place) in [pair for pair in back.items() if pair[0][0] == num_groups]:
            self._snapshots[snapshot] = self._cpu_snapshots[place]
        out, back = ({at: to for at, to in pairs.items() if at[0] < num_groups} for pairs in (out, back))
        offsets = range(self._limits.block_size)
        for cpu_block, block in out.items():
            self._cpu_kv[cpu_block] = [self._kv.get((*block, offset)) for offset in offsets]
            self._kv.update({(*block, offset): -1 for offset in offsets})  # nobody may read it any more
        for block, cpu_block in back.items():
            assert None not in self._cpu_kv[cpu_block], "a block was copied out before it was full"
            self._kv.update({(*block, offset): self._cpu_kv[cpu_block][offset] for offset in offsets})

    def _save_states(self, plan: StepPlan) -> None:
        if len(plan.state_copies):
            copies = unpack(StateCopies, plan.state_copies.data)
            for row, snapshot in zip(copies.saved_rows.tolist(), copies.saved_snapshots.tolist(), strict=True):
                self._snapshots[snapshot] = self._rows[row].checkpoint, self._rows[row].histories.copy()
                self._touched[len(self._limits.groups), snapshot] = plan.step_id

    def _restore_states(self, plan: StepPlan) -> None:
        restored: dict[int, int] = {}
        if len(plan.state_copies):
            copies = unpack(StateCopies, plan.state_copies.data)
            restored = dict(zip(copies.restored_rows.tolist(), copies.restored_snapshots.tolist(), strict=True))
            assert set(restored) <= set(plan.start_rows.tolist())
        for row, start in zip(plan.rows.tolist(), plan.num_computed_tokens.tolist(), strict=True):
            if self._limits.num_snapshots is not None and row in plan.start_rows:
                assert (row in restored) == (start > 0), "a row begins without the state behind its prefix"
        for row, snapshot in restored.items():
            [start] = plan.num_computed_tokens[plan.rows == row].tolist()
            checkpoint, histories = self._snapshots[snapshot]
            assert checkpoint <= start, "what came before the checkpoint is gone"
            assert histories[:start] == self._rows[row].histories[:start], "a state of other tokens"
            self._touched[len(self._limits.groups), snapshot] = plan.step_id

    def _apply_feedback(self, until: int) -> None:
        while self._feedback and self._feedback[0][0] <= until:
            for row_index, length, token_ids, draft_ids in self._feedback.popleft()[1]:
                row = self._rows[row_index]
                if length >= 0:
                    row.last_token_id = token_ids[length - row.length - 1]
                    row.length = length
                row.draft_ids = draft_ids

    def _apply_deltas(self, plan: StepPlan) -> None:
        offset = 0
        for i, row_index in enumerate(plan.start_rows.tolist()):
            row = self._rows[row_index]
            count = int(plan.start_num_tokens[i])
            row.known = plan.start_token_ids[offset : offset + count].tolist()
            offset += count
            row.length, row.limit, row.seed = count, int(plan.start_limits[i]), int(plan.start_params["seed"][i])
            row.prompt_len = int(plan.start_prompt_lens[i])
            row.num_logprobs = int(plan.start_params["num_reported"][i]) - 1
            row.num_prompt_logprobs = int(plan.start_params["num_prompt_reported"][i]) - 1
            row.has_grammar = bool(plan.start_params["has_grammar"][i])
            row.token_ids, row.histories = [], []
            for token_id in row.known:
                row.append(token_id)
        assert offset == len(plan.start_token_ids)
        for group, row_index, position, block in entries_of(plan):
            self._rows[row_index].table[group, position] = block

    def _inputs(self, plan: StepPlan, index: int) -> tuple[int, int, list[int]]:
        """Return the row, the position of its first token in this step, and its tokens, as the first stage has them."""
        row_index, bound = int(plan.rows[index]), int(plan.num_computed_tokens[index])
        row, count = self._rows[row_index], int(plan.num_scheduled_tokens[index])
        if index >= plan.num_decode_rows:
            token_ids = row.known[bound : bound + count]
            assert len(token_ids) == count
            assert plan.samples[index] == (bound + count == len(row.known))
            return row_index, bound, token_ids
        assert row.length - 1 <= bound, "the plan's bound is too low"
        assert self._limits.max_drafts or row.has_grammar or row.length - 1 == bound
        assert row.length == len(row.token_ids), "the row's feedback was not applied"
        assert row.last_token_id == row.token_ids[-1]
        return row_index, row.length - 1, [row.last_token_id, *row.draft_ids[: plan.num_drafts]]

    def _slot(self, row: ReplayRow, group: int, position: int) -> tuple[int, int, int]:
        block = row.table.get((group, position // self._limits.block_size), NULL_BLOCK)
        assert block != NULL_BLOCK, "a position below the limit has no block"
        self._touched[group, block] = self._step_id
        return group, block, position % self._limits.block_size

    def _check_history(self, row: ReplayRow, start: int) -> None:
        for index, group in enumerate(self._limits.groups):
            first = 0 if group.window is None else max(0, start + 1 - group.window)
            for position in range(first, min(start, row.limit)):
                assert self._kv[self._slot(row, index, position)] == row.histories[position], (
                    "the KV holds other tokens"
                )

    def _write(self, row: ReplayRow, start: int, token_ids: list[int]) -> None:
        history = row.histories[start - 1] if start else ROOT
        for position, token_id in enumerate(token_ids, start):
            history = extend(history, token_id)
            if position < row.limit:
                for group in range(len(self._limits.groups)):
                    self._kv[self._slot(row, group, position)] = history

    def _sample(self, row: ReplayRow, draft_ids: list[int]) -> list[int]:
        history, new = row.histories[-1], [next_token(row.histories[-1], row.seed)]
        for draft_id in draft_ids:
            if draft_id != new[-1]:
                break
            history = extend(history, new[-1])
            new.append(next_token(history, row.seed))
        return new[: max(row.limit - len(row.token_ids), 0)] if self._caps_at_limit else new

    def _draft(self, row: ReplayRow) -> list[int]:
        history, draft_ids = row.histories[-1] if row.histories else ROOT, []
        for _ in range(self._limits.max_drafts):
            right = next_token(history, row.seed)
            draft_ids.append(right if self._rng.random() < 0.6 else self._rng.randrange(VOCAB_SIZE))
            history = extend(history, draft_ids[-1])
        return draft_ids


def entries_of(plan: StepPlan) -> list[tuple[int, int, int, int]]:
    """Return a plan's entries of block tables: group, row, index and block of each."""
    columns = (plan.block_groups, plan.block_rows, plan.block_positions, plan.block_ids)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _columns(values: list[int], width: int) -> np.ndarray:
    """Return each value in column 0, and larger ones beside it."""
    return np.array(values, np.int32).reshape(-1, 1) + np.arange(width, dtype=np.int32)


class PlanWatcher:
    """Checks plans as they are dispatched, against the rules that can be seen from outside."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._cohort_of: dict[int, int] = {}  # steps in flight
        self._last_step_of_row = [NO_STEP] * limits.max_num_seqs
        self._next_step_id = 0
        self._num_collected = 0
        self.tables: list[dict[tuple[int, int], int]] = [{} for _ in range(limits.max_num_seqs)]

    def note_dispatched(self, plan: StepPlan) -> None:
        limits = self._limits
        assert plan.step_id == self._next_step_id
        self._next_step_id += 1
        num_rows, num_decode_rows = len(plan.rows), plan.num_decode_rows
        assert 0 < num_rows <= limits.max_step_rows, "an empty step, or one with too many rows"
        assert len(set(plan.rows.tolist())) == num_rows
        assert 0 <= plan.rows.min() <= plan.rows.max() < limits.max_num_seqs
        assert 0 < plan.num_scheduled_tokens.sum() <= limits.max_num_batched_tokens
        assert plan.num_scheduled_tokens.min() > 0
        assert 0 <= plan.num_drafts <= limits.max_drafts
        assert (plan.num_scheduled_tokens[:num_decode_rows] == 1 + plan.num_drafts).all()
        assert plan.samples[:num_decode_rows].all()
        assert NO_STEP <= plan.requires_feedback_of < plan.step_id
        self._cohort_of[plan.step_id] = plan.cohort
        has_prompts = num_decode_rows < num_rows
        most_steps = STEPS_PER_COHORT if has_prompts else limits.max_steps_per_cohort
        assert list(self._cohort_of.values()).count(plan.cohort) <= most_steps
        assert plan.cohort < limits.num_stages
        for row in plan.start_rows.tolist():
            assert self._last_step_of_row[row] < self._num_collected, "a row was reused before it was collected"
        assert set(plan.start_rows.tolist()) <= set(plan.rows[num_decode_rows:].tolist())
        assert set(plan.block_rows.tolist()) <= set(plan.rows.tolist())
        for row in plan.start_rows.tolist():
            self.tables[row] = {}
        for group, row, position, block in entries_of(plan):
            assert 0 < block < limits.groups[group].num_blocks
            self.tables[row][group, position] = block
        for row in plan.rows.tolist():
            self._last_step_of_row[row] = plan.step_id

    def note_collected(self, step_id: int) -> None:
        del self._cohort_of[step_id]
        self._num_collected = step_id + 1

"""Masks that come in time, late, for other drafts, or for a row's last owner."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from sampler_plans import VOCAB_SIZE, sampler_of, spec, start_plan

from raypp.messages import MaskUpdate, StepPlan
from raypp.ops.row_tokens import StepTokens
from raypp.ops.sample.adjust import adjusted
from raypp.ops.sample.tables import FREE, Adjustments, StepMasks, hold
from raypp.request import Request
from raypp.row_params import Needs
from raypp.stage.grammar_masks import GrammarMasks, body_mark
from raypp.stage.step_batch import StepBatch, graph_batch
from raypp.stage.step_end import EndInputs, StepEnd
from raypp.starting_rows import StartingRows
from raypp.types import SamplingParams

CPU = torch.device("cpu")
WORDS = -(-VOCAB_SIZE // 32)
PROMPT = [3, 4, 5]


def request(*, has_grammar: bool) -> Request:
    constraint = {"json_object": True} if has_grammar else None
    return Request("a", np.array(PROMPT, np.int32), SamplingParams(structured_outputs=constraint), 0)


def update(row: int, position: int, tokens: list[int], *, start: int = 0, after: int, drafts: tuple[int, ...] = ()):
    """Return masks of one row, each allowing one token."""
    masks = np.zeros((len(tokens), WORDS), np.int32)
    for index, token in enumerate(tokens):
        masks[index, token // 32] = 1 << token % 32
    return MaskUpdate(
        rows=np.array([row], np.int32),
        moments=np.array([[start, after, position, len(tokens)]]),
        draft_ids=np.array(drafts, np.int32),
        bitmasks=masks,
    )


def begun(rows: list[int], grammars: list[bool], max_drafts: int = 0) -> GrammarMasks:
    masks = GrammarMasks(spec(max_drafts=max_drafts), CPU)
    masks.start(StartingRows(start_plan([request(has_grammar=has) for has in grammars], rows), CPU))
    return masks


def decode(rows: list[int], step_id: int, wait_us: int = 0, num_drafts: int = 0) -> StepBatch:
    plan = start_plan([request(has_grammar=False)] * len(rows), rows)
    values = {**vars(plan), "step_id": step_id, "max_mask_wait_us": wait_us, "num_drafts": num_drafts}
    batch = graph_batch(torch.tensor(rows), query_len=1 + num_drafts)
    batch.plan, batch.rows_np = StepPlan(**values), np.array(rows)
    return batch


def step(masks: GrammarMasks, rows: list[int], step_id: int, wait_us: int = 0, num_drafts: int = 0) -> StepMasks:
    return masks.of_step(decode(rows, step_id, wait_us, num_drafts), body_mark(CPU))


def inputs_of(masks: GrammarMasks, batch: StepBatch) -> EndInputs:
    """Return what the end of a step does whose rows ask for nothing."""
    sampler = sampler_of(spec(), CPU)
    batch.logits_rows_np = batch.rows_np
    return StepEnd(sampler.history.tokens, sampler, masks, None, CPU).inputs(batch)


def applied(found: StepMasks, logits: torch.Tensor) -> torch.Tensor:
    """Return what the masks make of a step's logits."""
    nothing: Any = None
    return adjusted(logits, Adjustments(nothing, nothing, nothing, nothing, Needs.GREEDY, nothing, found.of_positions))


def held(
    found: StepMasks,
    rows: list[int],
    token_ids: list[list[int]],
    positions: list[int],
    drafts: list[list[int]] | None = None,
) -> tuple[StepTokens, list[int]]:
    """Return what the rows keep, and their lengths. What stood in front of position p is token p + 40."""
    tokens = StepTokens(
        rows=torch.tensor(rows),
        positions=torch.tensor(positions),
        token_ids=torch.tensor(token_ids, dtype=torch.int32),
        num_valid=torch.full((len(token_ids),), len(token_ids[0]), dtype=torch.int32),
    )
    draft_table = None if drafts is None else torch.tensor(drafts, dtype=torch.int32)
    return tokens, hold(tokens, found, torch.arange(41, 41 + 32).expand(8, -1), draft_table).tolist()


def test_a_step_without_grammars_has_no_masks() -> None:
    assert inputs_of(begun([0, 1], [False, False]), decode([0, 1], 1)).masks is None


def test_a_mask_in_time_holds_its_row_and_no_other() -> None:
    masks = begun([0, 1], [False, True])
    masks.put(update(1, 3, [9], after=-1))
    found = step(masks, [0, 1], 0)
    before = torch.zeros(2, VOCAB_SIZE)
    logits = applied(found, before)
    assert (before == 0).all()
    assert (logits[0] == 0).all()
    assert logits[1].argmax() == 9
    assert torch.isinf(logits[1]).sum() == VOCAB_SIZE - 1
    tokens, lengths = held(found, [0, 1], [[7], [9]], [3, 3])
    assert tokens.num_valid.tolist() == [1, 1]
    assert lengths == [4, 4]


def test_a_row_without_its_mask_yields_nothing_and_keeps_its_last_token() -> None:
    masks = begun([0, 1], [False, True])
    tokens, lengths = held(step(masks, [0, 1], 0), [0, 1], [[7], [8]], [3, 3])
    assert tokens.num_valid.tolist() == [1, 0]
    assert lengths == [4, 3]
    assert tokens.token_ids.tolist() == [[7], [43]]
    masks.put(update(1, 3, [9], after=0))
    assert held(step(masks, [0, 1], 1), [0, 1], [[7], [9]], [4, 3])[0].token_ids.tolist() == [[7], [9]]
    tokens, _ = held(step(masks, [0, 1], 2), [0, 1], [[7], [9]], [5, 4])  # the mask of a position that is past
    assert tokens.num_valid.tolist() == [1, 0]
    assert tokens.token_ids.tolist() == [[7], [44]]


def test_a_step_without_any_mask_in_time_leaves_all_logits() -> None:
    masks = begun([0, 1], [True, True])
    before = torch.randn(2, VOCAB_SIZE)
    found = step(masks, [0, 1], 0)
    assert torch.equal(applied(found, before), before)
    assert held(found, [0, 1], [[7], [8]], [3, 3])[0].num_valid.tolist() == [0, 0]
    masks.put(update(5, 3, [9], after=0))  # of a row that is not in the step
    assert torch.equal(applied(step(masks, [0, 1], 1), before), before)


def test_masks_behind_drafts_count_as_far_as_the_drafts_are_the_same() -> None:
    masks = begun([0], [True], max_drafts=3)
    masks.put(update(0, 3, [9, 10, 11], after=-1, drafts=(9, 10)))
    for drafts, kept in (([9, 10, 1], 3), ([9, 1, 11], 2), ([1, 10, 11], 1)):
        found = step(masks, [0], 0, num_drafts=3)
        assert held(found, [0], [[9, 10, 11, 12]], [3], [drafts])[0].num_valid.tolist() == [kept]
    assert found.of_positions.mask_of.tolist() == [0, 1, 2, -1]


def test_a_step_without_grammars_finds_all_rows_free_where_the_last_one_had_some() -> None:
    masks = begun([0, 1], [False, True])
    masks.put(update(1, 3, [9], after=-1))
    found = step(masks, [0, 1], 0)
    assert found.num_masks.tolist() == [FREE, 1]
    assert inputs_of(masks, decode([0], 1)).masks is None
    assert found.num_masks.tolist() == [FREE, FREE]
    assert found.of_positions.mask_of.tolist() == [-1, -1]


def test_masks_of_a_rows_last_owner_count_for_nothing() -> None:
    masks = begun([0], [True])
    masks.put(update(0, 3, [9], start=5, after=4))
    masks.put(update(0, 3, [8], start=0, after=9))  # comes after the next owner's
    found = step(masks, [0], 6)
    assert found.num_masks.tolist() == [0]  # the row still belongs to who started with step 0


def test_a_step_waits_as_long_as_its_plan_allows() -> None:
    masks = begun([0], [True])
    late = threading.Timer(0.05, lambda: masks.put(update(0, 3, [9], after=-1)))
    late.start()
    assert step(masks, [0], 0, wait_us=60_000_000).num_masks.tolist() == [1]
    late.join()
    assert step(masks, [0], 1, wait_us=1000).num_masks.tolist() == [1]  # an old one: the device will see
    assert step(masks, [0], 2, wait_us=60_000_000).num_masks.tolist() == [1]  # once late, nobody waits for it

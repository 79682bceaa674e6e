"""Where the tokens of pictures stand in a step, and the rotary positions of its tokens, against a plain reckoning."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from raypp import row_params
from raypp.encoder.protocol import EncodedItem
from raypp.messages import NO_BYTES, StepForm, StepPlan
from raypp.prompt_items import EncoderItem, PromptItems
from raypp.request import Request
from raypp.scheduler.plan_builder import pack_start_items
from raypp.scheduler.request_state import RequestState
from raypp.stage.step_batch import StepBatches, graph_batch
from raypp.stage.step_items import ItemRows, ItemStore, carried_rows, place_items, received_deepstack
from raypp.stage.step_sizes import StepSize
from raypp.starting_rows import StartingRows
from raypp.types import SamplingParams

CPU = torch.device("cpu")
H, L = 4, 2


class _Spec:
    items_see_ahead = False
    max_num_seqs = 8


def _item(seed: int, rows: int, columns: int) -> EncoderItem:
    patches = np.random.default_rng(seed).integers(0, 256, (4 * rows * columns, 3), np.uint8)
    return EncoderItem.of(patches, (1, 2 * rows, 2 * columns), rows * columns)


@st.composite
def prompts(draw) -> tuple[int, PromptItems | None]:
    """Return a prompt's length and items, maybe none."""
    token, starts, items = 0, [], []
    for index in range(draw(st.integers(0, 3))):
        token += draw(st.integers(0, 3))
        items.append(_item(index + 10 * len(starts), draw(st.integers(1, 3)), draw(st.integers(1, 3))))
        starts.append(token)
        token += items[-1].num_tokens
    num_tokens = token + draw(st.integers(1, 4))
    if not items:
        return num_tokens, None
    return num_tokens, PromptItems(tuple(items), tuple(starts), merge_size=2)


def _plan(rows, computed, scheduled, num_decode_rows, starting, num_item_tokens) -> StepPlan:
    empty = np.empty(0, np.int32)
    values = {name: empty for name in StepPlan.__dataclass_fields__}
    states = []
    for row, (num_tokens, items) in starting.items():
        request = Request(str(row), np.zeros(num_tokens, np.int32), SamplingParams(), 0, items=items)
        states.append(RequestState(request, 0, 99, frozenset(), num_tokens, row=row))
    values |= {
        "step_id": 0,
        "cohort": 0,
        "num_drafts": 1,
        "requires_feedback_of": -1,
        "num_decode_rows": num_decode_rows,
        "num_item_tokens": num_item_tokens,
        "rows": np.array(rows, np.int32),
        "num_scheduled_tokens": np.array(scheduled, np.int32),
        "num_computed_tokens": np.array(computed, np.int32),
        "samples": np.ones(len(rows), np.bool_),
        "start_rows": np.array(list(starting), np.int32),
        "start_num_tokens": np.array([num_tokens for num_tokens, _ in starting.values()], np.int32),
        "start_token_ids": np.zeros(sum(num_tokens for num_tokens, _ in starting.values()), np.int32),
        "start_params": np.zeros(len(starting), row_params.DTYPE),
        "start_lists": NO_BYTES,
        "start_items": pack_start_items(states),
    }
    return StepPlan(**values)  # type: ignore[arg-type]


@given(data=st.data(), all_prompts=st.lists(prompts(), min_size=1, max_size=4), num_decode=st.integers(0, 2))
def test_positions_and_places_of_any_step(data, all_prompts, num_decode):
    """Prefill rows compute any part of what they know, also past their prompt; decode rows stand behind theirs."""
    tables = ItemRows(_Spec(), CPU)  # type: ignore[arg-type]
    decoding = data.draw(st.lists(prompts(), min_size=num_decode, max_size=num_decode))
    known = dict(enumerate([*decoding, *all_prompts]))
    computed, scheduled, expected, places = [], [], [], []
    token = 0
    for row, (num_tokens, items) in known.items():
        offset = 0 if items is None else items.position_offset
        if row < num_decode:
            start, end = num_tokens + 1, num_tokens + 3
        else:
            start = data.draw(st.integers(0, num_tokens + 2))
            end = data.draw(st.integers(start + 1, num_tokens + 4))
        for position in range(start, end):
            if items is not None and position < num_tokens:
                expected.append(items.rope_positions(num_tokens)[position].tolist())
            else:
                expected.append([position + offset] * 3)
            for item, first in zip(*((items.items, items.starts) if items else ((), ())), strict=True):
                if first <= position < first + item.num_tokens:
                    places.append((token + position - start, item.key, position - first))
        computed.append(start)
        scheduled.append(end - start)
        token += end - start
    plan = _plan(list(known), computed, scheduled, num_decode, known, len(places))
    batch = StepBatches(1).of(plan, StepSize(StepForm.EAGER, None, (0, 0, 0, 0)))
    batch.upload(CPU)
    tables.start(StartingRows(plan, CPU))
    ranges = zip(computed, scheduled, strict=True)
    batch.positions = torch.cat([torch.arange(start, start + count) for start, count in ranges])
    found = tables.rope_positions(batch)
    assert found.ndim == (2 if places else 1)
    assert (found if places else found.unsqueeze(1).expand(-1, 3)).tolist() == expected
    items = tables.step_items(batch)
    assert (items is None) == (not places)
    if items is None:
        return
    assert items.token_indices.tolist() == [at for at, _, _ in places]
    assert [(part.key, at) for part in items.parts for at in range(part.start, part.end)] == [p[1:] for p in places]

    store, generator = ItemStore(), torch.Generator().manual_seed(0)
    for _, of_prompt in known.values():
        for item in of_prompt.items if of_prompt else ():
            store.put(EncodedItem(item.key, torch.randn(1 + L, item.num_tokens, H, generator=generator)))
    hidden = torch.zeros(batch.num_tokens, H)
    hidden, deepstack = place_items(hidden, items, store, lambda rows: rows)
    assert deepstack is not None
    carried = received_deepstack(items, carried_rows(deepstack, 1), num_layers=L)
    assert (deepstack.first_layer, carried.first_layer) == (0, L - 1)
    for index, (at, key, of_item) in enumerate(places):
        rows = store.rows(key)[:, of_item]
        assert torch.equal(hidden[at], rows[0])
        assert torch.equal(deepstack.rows[:, index], rows[1:])
        assert torch.equal(carried.rows[0, index], rows[-1])
    untouched = sorted(set(range(batch.num_tokens)) - {at for at, _, _ in places})
    assert not hidden[untouched].any()


def test_decode_rows_stand_behind_their_prompts():
    tables = ItemRows(_Spec(), CPU)  # type: ignore[arg-type]
    item = _item(0, 2, 3)
    items = PromptItems((item,), (1,), merge_size=2)
    assert items.rope_positions(9).tolist()[-2:] == [[4, 4, 4], [5, 5, 5]]
    assert items.position_offset == 6 - 9
    tables.start(StartingRows(_plan([3, 5], [0, 0], [9, 4], 0, {3: (9, items), 5: (4, None)}, 6), CPU))
    rows = torch.tensor([5, 3])

    def rope_positions(of_rows: torch.Tensor, query_len: int, positions: list[int]) -> list[int]:
        batch = graph_batch(of_rows, query_len)
        batch.positions = torch.tensor(positions)
        return tables.rope_positions(batch).tolist()

    assert rope_positions(rows, 1, [4, 9]) == [4, 9 - 3]
    assert rope_positions(rows, 2, [4, 5, 9, 10]) == [4, 5, 6, 7]
    tables.start(StartingRows(_plan([3], [0], [2], 0, {3: (2, None)}, 0), CPU))  # the row's next owner has none
    assert rope_positions(torch.tensor([3]), 1, [2]) == [2]

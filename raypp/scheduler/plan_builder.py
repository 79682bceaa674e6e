"""Builds a `StepPlan`: turns the requests of a step into its arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from raypp import row_params
from raypp.messages import NO_BYTES, NO_STEP, Bytes, StartItems, StartLists, StepPlan, pack_inside
from raypp.prompt_items import keys_to_array
from raypp.scheduler.request_state import RequestState
from raypp.scheduler.running import Chunk, InFlightStep

_MAX_INT32 = 2**31 - 1


def build_plan(
    step: InFlightStep, max_mask_wait_us: int = 0, block_copies: Bytes = NO_BYTES, state_copies: Bytes = NO_BYTES
) -> StepPlan:
    """Return the plan of a step, before it is counted in the states of its requests.

    Marks the block-table entries that it carries as sent. All else goes into the plan.
    """
    decoding, chunks, num_decode_rows, num_item_tokens = step.decoding, step.chunks, len(step.decoding), 0
    drafting, starts, blocks, grown, requires_feedback_of = _ALL_DRAFT, _NO_STARTS, _NO_BLOCKS, [], NO_STEP
    rows, num_scheduled_tokens, num_computed_tokens = [], [1 + step.num_drafts] * num_decode_rows, []
    for state in decoding:
        rows.append(state.row)
        # A row of length n computes from position n - 1 on: its last token has no KV yet.
        num_computed_tokens.append(state.num_tokens + state.max_in_flight_tokens - 1)
        requires_feedback_of = max(requires_feedback_of, state.last_yield_step)
        if state.has_new_blocks:
            grown.append(state)
    samples = np.ones(num_decode_rows + len(chunks), np.bool_)
    if chunks:
        rows += [chunk.state.row for chunk in chunks]
        num_scheduled_tokens += [chunk.num_tokens for chunk in chunks]
        num_computed_tokens += [chunk.start for chunk in chunks]
        samples[num_decode_rows:] = [chunk.is_last for chunk in chunks]
        requires_feedback_of = max(requires_feedback_of, *[chunk.row_last_step for chunk in chunks])
        starting = [chunk.state for chunk in chunks if chunk.is_first]
        if starting:
            starts = _start_arrays(starting)
        grown += [chunk.state for chunk in chunks if chunk.state.has_new_blocks]
        num_item_tokens = sum(map(_num_item_tokens, chunks))
        if any(chunk.state.never_drafts for chunk in chunks):
            drafting = np.array([*[True] * num_decode_rows, *[not chunk.state.never_drafts for chunk in chunks]])
    if grown:
        blocks = _block_arrays(grown)
    return StepPlan(
        step_id=step.step_id,
        cohort=step.cohort.index,
        num_drafts=step.num_drafts,
        requires_feedback_of=requires_feedback_of,
        num_decode_rows=num_decode_rows,
        num_item_tokens=num_item_tokens,
        rows=np.array(rows, np.int32),
        num_scheduled_tokens=np.array(num_scheduled_tokens, np.int32),
        num_computed_tokens=np.array(num_computed_tokens, np.int32),
        samples=samples,
        max_mask_wait_us=max_mask_wait_us,
        drafting=drafting,
        block_copies=block_copies,
        state_copies=state_copies,
        **starts,
        **blocks,
    )


def _num_item_tokens(chunk: Chunk) -> int:
    items = chunk.state.request.items
    return 0 if items is None else items.num_tokens_in(chunk.start, chunk.start + chunk.num_tokens)


def _start_arrays(starting: Sequence[RequestState]) -> dict[str, NDArray[Any]]:
    requests = [state.request for state in starting]
    lists = [_lists_of(state) for state in starting]
    return {
        "start_rows": _int32s(state.row for state in starting),
        "start_prompt_lens": _int32s(len(request.prompt_token_ids) for request in requests),
        "start_limits": _int32s(state.limit for state in starting),
        "start_num_tokens": _int32s(state.num_tokens for state in starting),
        "start_token_ids": np.concatenate([state.token_ids(0, state.num_tokens) for state in starting]),
        "start_params": np.array([_params_of(*known) for known in zip(starting, lists, strict=True)], row_params.DTYPE),
        "start_lists": _pack_lists(lists),
        "start_items": pack_start_items(starting),
    }


class _Lists(NamedTuple):
    """The lists among a request's sampling parameters."""

    end_token_ids: Sequence[int]
    biases: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    bad_words: Sequence[Sequence[int]]


def _lists_of(state: RequestState) -> _Lists:
    params = state.request.params
    return _Lists(
        sorted(state.end_token_ids) if params.min_tokens else (),
        params.logit_bias,
        # A grammar's masks apply the allowed tokens themselves: only where the grammar leaves any of them.
        () if params.structured_outputs else params.allowed_token_ids or (),
        state.request.bad_word_token_ids,
    )


def _params_of(state: RequestState, lists: _Lists) -> tuple[float, ...]:
    """Return the record of a row that starts, in the order of `row_params.COLUMNS`."""
    request, params = state.request, state.request.params
    others = {
        "seed": request.seed,
        "top_k": min(params.top_k, _MAX_INT32),
        "min_length": len(request.prompt_token_ids) + params.min_tokens if params.min_tokens else 0,
        "num_end_tokens": len(lists.end_token_ids),
        "num_biased": len(lists.biases),
        "num_allowed": len(lists.allowed_token_ids),
        "num_bad_words": len(lists.bad_words),
        "num_reported": 0 if params.logprobs is None else 1 + params.logprobs,
        "num_prompt_reported": 1 + (params.prompt_logprobs or 0) if state.scores_prompt else 0,
        "has_grammar": params.structured_outputs is not None,
    }
    return tuple(
        [others[name] if name in others else getattr(params, parameter) for name, *_, parameter in row_params.COLUMNS]
    )


def _pack_lists(lists: Sequence[_Lists]) -> Bytes:
    """Return a packed `StartLists`; nothing when all are empty."""
    if not any(any(each) for each in lists):
        return NO_BYTES
    bad_words = [word for each in lists for word in each.bad_words]
    return pack_inside(
        StartLists(
            end_token_ids=_int32s(token_id for each in lists for token_id in each.end_token_ids),
            bias_token_ids=_int32s(token_id for each in lists for token_id in each.biases),
            bias=np.fromiter((bias for each in lists for bias in each.biases.values()), np.float32),
            allowed_token_ids=_int32s(token_id for each in lists for token_id in each.allowed_token_ids),
            bad_word_lens=_int32s(map(len, bad_words)),
            bad_word_token_ids=_int32s(token_id for word in bad_words for token_id in word),
        )
    )


def pack_start_items(starting: Sequence[RequestState]) -> Bytes:
    """Return a packed `StartItems` of those requests that have images; nothing when none has."""
    known = [
        (state.row, state.request.items, len(state.request.prompt_token_ids))
        for state in starting
        if state.request.items is not None
    ]
    if not known:
        return NO_BYTES
    each = [items for _, items, _ in known]
    return pack_inside(
        StartItems(
            rows=_int32s(row for row, _, _ in known),
            position_offsets=_int32s(items.position_offset for items in each),
            num_positions=_int32s(num_tokens for _, _, num_tokens in known),
            rope_positions=np.concatenate([items.rope_positions(num_tokens) for _, items, num_tokens in known]),
            num_items=_int32s(len(items.items) for items in each),
            item_starts=_int32s(start for items in each for start in items.starts),
            item_lens=_int32s(item.num_tokens for items in each for item in items.items),
            item_keys=keys_to_array([item.key for items in each for item in items.items]),
        )
    )


def _block_arrays(grown: Sequence[RequestState]) -> dict[str, NDArray[Any]]:
    groups: list[int] = []
    rows: list[int] = []
    positions: list[int] = []
    block_ids: list[int] = []
    for state in grown:
        state.has_new_blocks = False
        for group, table in enumerate(state.tables):
            num_sent, num_blocks = table.num_sent, len(table.blocks)
            groups += [group] * (num_blocks - num_sent)
            rows += [state.row] * (num_blocks - num_sent)
            positions += range(num_sent, num_blocks)
            block_ids += table.blocks[num_sent:]
            table.num_sent = num_blocks
    return dict(zip(_BLOCK_ARRAYS, np.array([groups, rows, positions, block_ids], np.int32), strict=True))


def _int32s(values: Iterable[int]) -> NDArray[np.int32]:
    return np.fromiter(values, np.int32)


def _empty(dtype: DTypeLike) -> NDArray[Any]:
    array = np.empty(0, dtype)
    array.flags.writeable = False  # shared by all plans
    return array


_NO_STARTS = {
    name: _empty(np.int32)
    for name in ("start_rows", "start_prompt_lens", "start_limits", "start_num_tokens", "start_token_ids")
} | {"start_params": _empty(row_params.DTYPE), "start_lists": NO_BYTES, "start_items": NO_BYTES}
_BLOCK_ARRAYS = ("block_groups", "block_rows", "block_positions", "block_ids")
_NO_BLOCKS = {name: _empty(np.int32) for name in _BLOCK_ARRAYS}
_ALL_DRAFT = _empty(np.bool_)

"""From lists of requests to the arrays of a `StepPlan`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from raypp.messages import NO_BYTES, NO_STEP, StepPlan
from raypp.scheduler.in_flight import Chunk, InFlightStep
from raypp.scheduler.request_state import RequestState
from raypp.scheduler.start_extras import pack_extras
from raypp.scheduler.start_items import pack_items

_MAX_INT32 = 2**31 - 1


def build_plan(step: InFlightStep, max_mask_wait_us: int = 0) -> StepPlan:
    """Return the plan of a step, before it is counted in the states of its requests.

    Marks the block-table entries that it carries as sent. `max_mask_wait_us` goes into the plan.
    """
    decoding, chunks = step.decoding, step.chunks
    num_decode_rows, width = len(decoding), 1 + step.num_drafts
    rows = [state.row for state in decoding]
    num_scheduled_tokens = [width] * num_decode_rows
    # A row of length n computes from position n - 1 on: its last token has no KV yet.
    num_computed_tokens = [state.num_tokens + state.max_in_flight_tokens - 1 for state in decoding]
    samples = np.ones(num_decode_rows + len(chunks), np.bool_)
    requires_feedback_of = max([state.last_yield_step for state in decoding], default=NO_STEP)
    grown = [state for state in decoding if state.num_sent_blocks != len(state.blocks)]
    if chunks:
        rows += [chunk.state.row for chunk in chunks]
        num_scheduled_tokens += [chunk.num_tokens for chunk in chunks]
        num_computed_tokens += [chunk.start for chunk in chunks]
        samples[num_decode_rows:] = [chunk.is_last for chunk in chunks]
        requires_feedback_of = max(requires_feedback_of, *[chunk.row_last_step for chunk in chunks])
        grown += [chunk.state for chunk in chunks if chunk.is_first]
    return StepPlan(
        step_id=step.step_id,
        cohort=step.cohort.index,
        num_drafts=step.num_drafts,
        requires_feedback_of=requires_feedback_of,
        num_decode_rows=num_decode_rows,
        num_item_tokens=sum(map(_num_item_tokens, chunks)),
        rows=_int32s(rows),
        num_scheduled_tokens=_int32s(num_scheduled_tokens),
        num_computed_tokens=_int32s(num_computed_tokens),
        samples=samples,
        max_mask_wait_us=max_mask_wait_us,
        drafting=_drafting(decoding, chunks),
        **_start_arrays(chunks),
        **_block_arrays(grown),
    )


def _drafting(decoding: Sequence[RequestState], chunks: Sequence[Chunk]) -> NDArray[np.bool_]:
    if not any(chunk.state.never_drafts for chunk in chunks):
        return _ALL_DRAFT
    return np.array([*[True] * len(decoding), *[not chunk.state.never_drafts for chunk in chunks]])


def _num_item_tokens(chunk: Chunk) -> int:
    items = chunk.state.request.items
    return 0 if items is None else items.num_tokens_in(chunk.start, chunk.start + chunk.num_tokens)


def _start_arrays(chunks: Sequence[Chunk]) -> dict[str, NDArray[Any]]:
    starting = [chunk.state for chunk in chunks if chunk.is_first]
    if not starting:
        return _NO_STARTS
    requests = [state.request for state in starting]
    params = [request.params for request in requests]
    return {
        "start_rows": _int32s([state.row for state in starting]),
        "start_prompt_lens": _int32s([len(request.prompt_token_ids) for request in requests]),
        "start_limits": _int32s([state.limit for state in starting]),
        "start_num_tokens": _int32s([state.num_tokens for state in starting]),
        "start_token_ids": np.concatenate([state.token_ids(0, state.num_tokens) for state in starting]),
        "start_temperature": np.array([p.temperature for p in params], np.float32),
        "start_top_p": np.array([p.top_p for p in params], np.float32),
        "start_top_k": _int32s([min(p.top_k, _MAX_INT32) for p in params]),
        "start_min_p": np.array([p.min_p for p in params], np.float32),
        "start_seed": np.array([request.seed for request in requests], np.int64),
        "start_extras": pack_extras(starting),
        "start_items": pack_items(starting),
    }


def _block_arrays(grown: Sequence[RequestState]) -> dict[str, NDArray[Any]]:
    if not grown:
        return _NO_BLOCKS
    rows: list[int] = []
    positions: list[int] = []
    block_ids: list[int] = []
    for state in grown:
        num_sent, num_blocks = state.num_sent_blocks, len(state.blocks)
        rows += [state.row] * (num_blocks - num_sent)
        positions += range(num_sent, num_blocks)
        block_ids += state.blocks[num_sent:]
        state.num_sent_blocks = num_blocks
    return {"block_rows": _int32s(rows), "block_positions": _int32s(positions), "block_ids": _int32s(block_ids)}


def _int32s(values: Sequence[int]) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def _empty(dtype: DTypeLike) -> NDArray[Any]:
    array = np.empty(0, dtype)
    array.flags.writeable = False  # shared by all plans
    return array


_NO_STARTS = {
    name: _empty(np.int32)
    for name in ("start_rows", "start_prompt_lens", "start_limits", "start_num_tokens", "start_token_ids")
} | {
    "start_temperature": _empty(np.float32),
    "start_top_p": _empty(np.float32),
    "start_top_k": _empty(np.int32),
    "start_min_p": _empty(np.float32),
    "start_seed": _empty(np.int64),
    "start_extras": NO_BYTES,
    "start_items": NO_BYTES,
}
_NO_BLOCKS = {name: _empty(np.int32) for name in ("block_rows", "block_positions", "block_ids")}
_ALL_DRAFT = _empty(np.bool_)

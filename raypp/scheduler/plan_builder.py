"""Builds a `StepPlan`: turns the requests of a step into its arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from raypp.messages import NO_BYTES, NO_STEP, Bytes, StartExtras, StartItems, StepPlan, pack_inside
from raypp.prompt_items import keys_to_array
from raypp.request import Request
from raypp.scheduler.in_flight import Chunk, InFlightStep
from raypp.scheduler.request_state import RequestState

_MAX_INT32 = 2**31 - 1
_NO_LOGPROBS = -1


def build_plan(step: InFlightStep, max_mask_wait_us: int = 0, block_copies: Bytes = NO_BYTES) -> StepPlan:
    """Return the plan of a step, before it is counted in the states of its requests.

    Marks the block-table entries that it carries as sent. `max_mask_wait_us` and `block_copies` go into the plan.
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
        block_copies=block_copies,
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
        "start_rows": _int32s(state.row for state in starting),
        "start_prompt_lens": _int32s(len(request.prompt_token_ids) for request in requests),
        "start_limits": _int32s(state.limit for state in starting),
        "start_num_tokens": _int32s(state.num_tokens for state in starting),
        "start_token_ids": np.concatenate([state.token_ids(0, state.num_tokens) for state in starting]),
        "start_temperature": _float32s(p.temperature for p in params),
        "start_top_p": _float32s(p.top_p for p in params),
        "start_top_k": _int32s(min(p.top_k, _MAX_INT32) for p in params),
        "start_min_p": _float32s(p.min_p for p in params),
        "start_seed": np.array([request.seed for request in requests], np.int64),
        "start_extras": pack_start_extras(starting),
        "start_items": pack_start_items(starting),
    }


def pack_start_extras(starting: Sequence[RequestState]) -> Bytes:
    """Return a packed `StartExtras` of the requests with sampling parameters that few have; nothing without any."""
    states = [state for state in starting if _has_extras(state.request)]
    if not states:
        return NO_BYTES
    requests = [state.request for state in states]
    params = [request.params for request in requests]
    end_token_ids = [sorted(state.end_token_ids) if state.request.params.min_tokens else [] for state in states]
    # A grammar's masks apply the allowed tokens themselves: only where the grammar leaves any of them.
    allowed = [() if p.structured_outputs else p.allowed_token_ids or () for p in params]
    bad_words = [request.bad_word_token_ids for request in requests]
    return pack_inside(
        StartExtras(
            rows=_int32s(state.row for state in states),
            presence_penalty=_float32s(p.presence_penalty for p in params),
            frequency_penalty=_float32s(p.frequency_penalty for p in params),
            repetition_penalty=_float32s(p.repetition_penalty for p in params),
            min_lengths=_int32s(len(r.prompt_token_ids) + r.params.min_tokens for r in requests),
            num_end_tokens=_int32s(map(len, end_token_ids)),
            end_token_ids=_int32s(token_id for token_ids in end_token_ids for token_id in token_ids),
            num_biased=_int32s(len(p.logit_bias) for p in params),
            bias_token_ids=_int32s(token_id for p in params for token_id in p.logit_bias),
            bias=_float32s(bias for p in params for bias in p.logit_bias.values()),
            num_allowed=_int32s(map(len, allowed)),
            allowed_token_ids=_int32s(token_id for token_ids in allowed for token_id in token_ids),
            num_bad_words=_int32s(map(len, bad_words)),
            bad_word_lens=_int32s(len(word) for words in bad_words for word in words),
            bad_word_token_ids=_int32s(token_id for words in bad_words for word in words for token_id in word),
            num_logprobs=_int32s(_NO_LOGPROBS if p.logprobs is None else p.logprobs for p in params),
            num_prompt_logprobs=_int32s(
                s.request.params.prompt_logprobs or 0 if s.scores_prompt else _NO_LOGPROBS for s in states
            ),
            has_grammar=_int32s(p.structured_outputs is not None for p in params),
        )
    )


def _has_extras(request: Request) -> bool:
    params = request.params
    return bool(
        request.bad_word_token_ids
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1
        or params.min_tokens
        or params.logit_bias
        or params.allowed_token_ids
        or params.logprobs is not None
        or params.prompt_logprobs is not None
        or params.structured_outputs is not None
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


def _int32s(values: Iterable[int]) -> NDArray[np.int32]:
    return np.fromiter(values, np.int32)


def _float32s(values: Iterable[float]) -> NDArray[np.float32]:
    return np.fromiter(values, np.float32)


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

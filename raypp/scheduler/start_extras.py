"""The sampling parameters that few requests have, as the last stage is told of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from raypp.messages import NO_BYTES, Bytes, StartExtras, pack_inside
from raypp.scheduler.request import Request
from raypp.scheduler.request_state import RequestState

_NONE = -1


def pack_extras(starting: Sequence[RequestState]) -> Bytes:
    """Return a packed `StartExtras` of those requests that need one; nothing when none does."""
    states = [state for state in starting if _has_extras(state.request)]
    if not states:
        return NO_BYTES
    requests = [state.request for state in states]
    params = [request.params for request in requests]
    end_token_ids = [sorted(state.end_token_ids) if state.request.params.min_tokens else [] for state in states]
    # Under a grammar the masks see to it: of what the grammar allows, something must be left.
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
            num_logprobs=_int32s(_NONE if p.logprobs is None else p.logprobs for p in params),
            num_prompt_logprobs=_int32s(
                s.request.params.prompt_logprobs or 0 if s.scores_prompt else _NONE for s in states
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


def _int32s(values: Iterable[int]) -> NDArray[np.int32]:
    return np.fromiter(values, np.int32)


def _float32s(values: Iterable[float]) -> NDArray[np.float32]:
    return np.fromiter(values, np.float32)

"""When a request ends."""

from __future__ import annotations

from raypp.scheduler.request import Request
from raypp.scheduler.request_state import RequestState
from raypp.types import FinishReason


def end_token_ids(request: Request) -> frozenset[int]:
    """Return all tokens that end the request."""
    if not request.params.stop_token_ids and not request.params.ignore_eos:
        return request.eos_token_ids  # as nearly all: a set of its own would be the largest part of many a request
    stop = frozenset(request.params.stop_token_ids)
    return stop if request.params.ignore_eos else stop | request.eos_token_ids


def take_tokens(state: RequestState, token_ids: list[int]) -> list[int]:
    """Append new tokens to the request's output, up to the one that ends it; return those that were taken.

    The ending token is kept, and the request's `finish_reason` set. A token that is EOS and stop token counts as EOS.
    A negative one is none: the logits were not finite, and the request ends with an error, which the caller tells.
    """
    num_taken, reason = 0, FinishReason.NONE
    for token_id in token_ids:
        if token_id < 0:
            reason = FinishReason.ERROR
            break
        num_taken += 1
        if token_id in state.end_token_ids:
            reason = FinishReason.STOP
        elif state.num_tokens + num_taken >= state.limit:
            reason = FinishReason.LENGTH
        else:
            continue
        break
    if num_taken < len(token_ids):
        token_ids = token_ids[:num_taken]
    request = state.request
    request.output_token_ids += token_ids
    request.finish_reason = reason
    state.num_tokens += num_taken
    if reason is FinishReason.STOP and (request.params.ignore_eos or token_ids[-1] not in request.eos_token_ids):
        request.stop_token_id = token_ids[-1]
    return token_ids

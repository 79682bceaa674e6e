"""Finds what ends a request: the most tokens that it may have, and the tokens that stop it."""

from __future__ import annotations

from raypp.errors import RequestError
from raypp.request import Request
from raypp.scheduler.limits import SchedulerLimits
from raypp.scheduler.request_state import RequestState
from raypp.types import FinishReason


def token_limit(request: Request, limits: SchedulerLimits) -> int:
    """Return the most tokens that the request may ever have, prompt and output together.

    Raises:
        RequestError: its prompt is empty or too long, or the KV cache too small for it even when it is alone.
    """
    request_id, num_prompt_tokens = request.request_id, len(request.prompt_token_ids)
    if not num_prompt_tokens:
        raise RequestError("the prompt is empty", request_id=request_id, got="0 tokens", expected="at least one token")
    if num_prompt_tokens >= limits.max_model_len:
        raise RequestError(
            "the prompt is too long",
            request_id=request_id,
            got=f"{num_prompt_tokens} tokens",
            expected=f"fewer than max_model_len = {limits.max_model_len}, which counts the output too",
            hint="shorten the prompt or raise max_model_len",
        )
    limit = min(num_prompt_tokens + request.params.max_tokens, limits.max_model_len)
    if limits.num_blocks_for(limit) > limits.num_usable_blocks:
        raise RequestError(
            "the KV cache cannot hold this request even when it is alone",
            request_id=request_id,
            got=f"{num_prompt_tokens} prompt tokens and max_tokens = {request.params.max_tokens}",
            expected=f"at most {limits.num_usable_blocks * limits.block_size} tokens, prompt and output together",
            hint="lower max_tokens, or give the KV cache more blocks",
        )
    return limit


def check_begun(request: Request, limit: int, end_token_ids: frozenset[int], vocab_size: int) -> None:
    """Check the tokens that a request comes with from an engine before this one.

    Args:
        request: The request.
        limit: Its `token_limit`.
        end_token_ids: Its `end_token_ids`.
        vocab_size: V.

    Raises:
        RequestError: they have ended it, or are not the model's.
    """
    token_ids, most = request.output_token_ids, limit - len(request.prompt_token_ids) - 1
    if len(token_ids) > most:
        raise RequestError(
            "the request has ended: it comes with all tokens that it may have",
            request_id=request.request_id,
            got=f"{len(token_ids)} output tokens",
            expected=f"at most {most}, so that one is left of max_tokens and of max_model_len",
            hint="hand over unfinished requests only",
        )
    if ending := end_token_ids.intersection(token_ids):
        raise RequestError(
            "the request has ended: it comes with a token that ends it",
            request_id=request.request_id,
            got=f"token {min(ending)} among its output tokens",
            expected="output tokens that end nothing",
            hint="hand over unfinished requests only",
        )
    unknown = [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]
    if unknown:
        raise RequestError(
            "an output token that the request comes with is not in the vocabulary",
            request_id=request.request_id,
            got=unknown[0],
            expected=f"0 to {vocab_size - 1}",
            hint="hand a request over to an engine of the same model",
        )


def end_token_ids(request: Request) -> frozenset[int]:
    """Return all tokens that end the request."""
    if not request.params.stop_token_ids and not request.params.ignore_eos:
        return request.eos_token_ids  # shared: a set for each request would take more memory than the rest of it
    stop = frozenset(request.params.stop_token_ids)
    return stop if request.params.ignore_eos else stop | request.eos_token_ids


def take_tokens(state: RequestState, token_ids: list[int]) -> list[int]:
    """Append new tokens to the request's output, up to the one that ends it; return those that were taken.

    The ending token is kept, and the request's `finish_reason` set. A token that is EOS and stop token counts as EOS.
    A negative id says that the logits were not finite: the request ends with an error, which the caller reports.
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

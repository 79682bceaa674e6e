"""Requests that could never run are refused when they come, not found out when they are stuck."""

from __future__ import annotations

from raypp.errors import RequestError
from raypp.scheduler.limits import SchedulerLimits
from raypp.scheduler.request import Request


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

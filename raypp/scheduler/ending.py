"""Finds what ends a request: the most tokens that it may have, and the tokens that stop it."""

from __future__ import annotations

from itertools import accumulate

from raypp.errors import RequestError
from raypp.messages import StepLogprobs, StepResult, TokenLogprobs, unpack
from raypp.request import LogprobRows, Request, RequestUpdate
from raypp.scheduler.limits import SchedulerLimits
from raypp.scheduler.request_state import RequestState


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


class StepLogprobsReader:
    """Looks up the log-probabilities of one step's rows."""

    def __init__(self, result: StepResult, num_decode_rows: int, width: int) -> None:
        """Read a result.

        Args:
            result: Of the step; it must have log-probabilities.
            num_decode_rows: The step's decode rows, which come first.
            width: 1 + K, the positions of each decode row.
        """
        message = unpack(StepLogprobs, result.logprobs.data)
        self._output = TokenLogprobs(message.token_ids, message.logprobs, message.ranks)
        self._prompts = TokenLogprobs(message.prompt_token_ids, message.prompt_logprobs, message.prompt_ranks)
        indices = message.indices.tolist()
        lengths = [width if index < num_decode_rows else 1 for index in indices]
        self._first = dict(zip(indices, accumulate([0, *lengths]), strict=False))
        counts = message.prompt_counts.tolist()
        starts = zip(accumulate([0, *counts]), counts, message.prompt_starts.tolist(), strict=False)
        self._prompt = dict(zip(message.prompt_indices.tolist(), starts, strict=True))

    def update(self, state: RequestState, index: int, taken: list[int]) -> RequestUpdate:
        """Return what the step brought to a request, and count its prompt tokens that were reported.

        Args:
            state: The request.
            index: Of its row in the step.
            taken: Its new tokens, as far as they were kept.
        """
        params, prompt = state.request.params, None
        if params.prompt_logprobs is not None and index in self._prompt:
            prompt = self._of_prompt(index, state.num_scored_tokens, params.prompt_logprobs)
        if prompt is not None:
            state.num_scored_tokens += prompt.end - prompt.start
        output = None
        if taken and params.logprobs is not None:
            first = self._first[index]
            output = LogprobRows(self._output, first, first + len(taken), 1 + params.logprobs)
        return RequestUpdate(state.request, taken, state.request.finish_reason, output, prompt)

    def _of_prompt(self, index: int, num_scored_tokens: int, num_top: int) -> LogprobRows | None:
        """Return those of a row's prompt tokens that come after the first `num_scored_tokens` ones; None without any.

        A prefill that is done again after a preemption reports again what was reported already.
        """
        first, count, start = self._prompt[index]
        num_old = num_scored_tokens + 1 - start  # token 0 is not reported
        assert num_old >= 0, "prompt tokens were skipped"
        if num_old >= count:
            return None
        return LogprobRows(self._prompts, first + num_old, first + count, 1 + num_top)

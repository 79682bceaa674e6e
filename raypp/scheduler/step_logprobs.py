"""Reads the log-probabilities of a step's result, row by row."""

from __future__ import annotations

from itertools import accumulate

from raypp.messages import StepLogprobs, StepResult, TokenLogprobs, unpack
from raypp.request import LogprobRows, RequestUpdate
from raypp.scheduler.request_state import RequestState


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

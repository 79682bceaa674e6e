"""The log-probabilities that came with a step's result, row by row."""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from raypp.messages import StepLogprobs, StepResult, TokenLogprobs, unpack
from raypp.scheduler.request import RequestUpdate
from raypp.scheduler.request_state import RequestState


class LogprobsOfStep:
    """Looks up what a row of a step reported."""

    def __init__(self, result: StepResult, num_decode_rows: int, width: int) -> None:
        """Read a result's log-probabilities, which it has.

        Args:
            result: Of the step.
            num_decode_rows: Its first rows.
            width: 1 + K, the positions of each of them.
        """
        self._message = unpack(StepLogprobs, result.logprobs.data)
        indices = self._message.indices.tolist()
        lengths = [width if index < num_decode_rows else 1 for index in indices]
        self._first = dict(zip(indices, accumulate([0, *lengths]), strict=False))
        counts = self._message.prompt_counts.tolist()
        starts = zip(accumulate([0, *counts]), counts, self._message.prompt_starts.tolist(), strict=False)
        self._prompt = dict(zip(self._message.prompt_indices.tolist(), starts, strict=True))

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
            state.num_scored_tokens += len(prompt.ranks)
        output = None
        if taken and params.logprobs is not None:
            first, message = self._first[index], self._message
            columns = (message.token_ids, message.logprobs, message.ranks)
            output = _of(*columns, first, first + len(taken), params.logprobs)
        return RequestUpdate(state.request, taken, output, prompt)

    def _of_prompt(self, index: int, num_scored_tokens: int, num_top: int) -> TokenLogprobs | None:
        """Return those of a row's prompt tokens that come after the first `num_scored_tokens` ones; None without any.

        A prefill that is done again after a preemption reports again what was reported already.
        """
        first, count, start = self._prompt[index]
        num_old = num_scored_tokens + 1 - start  # token 0 is not reported
        assert num_old >= 0, "prompt tokens were skipped"
        if num_old >= count:
            return None
        message = self._message
        columns = (message.prompt_token_ids, message.prompt_logprobs, message.prompt_ranks)
        return _of(*columns, first + num_old, first + count, num_top)


def _of(
    token_ids: np.ndarray, logprobs: np.ndarray, ranks: np.ndarray, start: int, end: int, num_top: int
) -> TokenLogprobs:
    return TokenLogprobs(token_ids[start:end, : 1 + num_top], logprobs[start:end, : 1 + num_top], ranks[start:end])

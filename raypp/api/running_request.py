"""One request on its way through the engine, as its client sees it: its continuations, its clock, its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

from raypp.api.detokenizer import Decoder
from raypp.api.engine_counters import sum_by_position
from raypp.api.output_logprobs import LogprobLists, decoded_logprobs
from raypp.api.running_completion import RunningCompletion
from raypp.api.stop import StopScope, WholeText
from raypp.errors import RayppError
from raypp.request import Request
from raypp.types import Logprobs, RequestMetrics, RequestOutput

COMPLETION_SEPARATOR = "\0"
"""Stands between a request's id and a continuation's index in the engine's names; no id holds it."""


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that has been validated and tokenized, and not been sent yet: of its first continuation."""

    request: Request
    text: str | None = None  # of the prompt; None when it came as token ids
    make_stop_scope: Callable[[], StopScope] = WholeText  # of which parts of a continuation stop strings are about

    def seed_of(self, index: int) -> int:
        """Return the seed of a continuation; the first one's is the request's own."""
        if index == 0:
            return self.request.seed
        digest = blake2b(f"{self.request.seed}:{index}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)


class RunningRequest:
    """Collects what the engine yields for one request, until all its continuations have ended or it failed."""

    def __init__(
        self,
        prepared: PreparedRequest,
        handles: Sequence[int],
        decoder: Decoder | None,
        *,
        stream: bool,
        on_change: Callable[[RunningRequest], None],
    ) -> None:
        """Begin the request's clock.

        Args:
            prepared: What is sent.
            handles: The numbers that outputs name its continuations by.
            decoder: Makes its texts; None leaves them empty.
            stream: Whether outputs are asked for before the end.
            on_change: Called when there is something to see: with every update when streaming, else at the end.
        """
        request = prepared.request
        self.request_id = request.request_id
        self.params = request.params
        self.prompt_token_ids = request.prompt_token_ids
        self.error: RayppError | None = None
        names = [self.request_id]
        if len(handles) > 1:
            names = [f"{self.request_id}{COMPLETION_SEPARATOR}{index}" for index in range(len(handles))]
        self.completions = [
            RunningCompletion(
                index,
                name,
                handle,
                request.params,
                decoder,
                request.prompt_token_ids,
                prepared.make_stop_scope,
                streams=stream,
            )
            for index, (name, handle) in enumerate(zip(names, handles, strict=True))
        ]
        self.prepared = prepared
        self.is_streamed = stream
        self._decoder = decoder
        self._on_change = on_change
        self._arrival_time_s = time.time()
        self._arrival_s = time.monotonic()
        self._first_token_s: float | None = None
        self._finish_s: float | None = None
        self._prompt_logprobs: list[Logprobs | None] | None = None if request.params.prompt_logprobs is None else [None]
        self._num_prompt_logprobs = 1  # of the engine that has the request now; the first token has none

    @property
    def is_ended(self) -> bool:
        """Whether nothing more will come."""
        return self.error is not None or self._finish_s is not None

    @property
    def num_tokens(self) -> int:
        """Output tokens of all continuations."""
        return sum([len(completion.token_ids) for completion in self.completions])

    @property
    def unfinished(self) -> list[RunningCompletion]:
        """The continuations that have not ended."""
        return [completion for completion in self.completions if not completion.is_ended]

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether some that were asked for have not come."""
        return self._prompt_logprobs is not None and self._num_prompt_logprobs < len(self.prompt_token_ids)

    def begin_anew(self, completion: RunningCompletion) -> list[int]:
        """Take in that another engine goes on with one of the continuations; return the tokens that it has.

        Prompt log-probabilities that are not complete will come again from the first one on.
        """
        if completion.index == 0 and self.lacks_prompt_logprobs:
            self._num_prompt_logprobs = 1
        return completion.begin_anew(round((time.monotonic() - self._arrival_s) * 1e6))

    def add_prompt_logprobs(self, prompt_logprobs: LogprobLists | None) -> None:
        """Take in those of the next prompt tokens, if any."""
        if self._prompt_logprobs is not None and prompt_logprobs is not None:
            start, decoded = self._num_prompt_logprobs, decoded_logprobs(prompt_logprobs, self._decoder)
            self._num_prompt_logprobs += len(decoded)
            self._prompt_logprobs[start : self._num_prompt_logprobs] = decoded  # nobody who looks sees them grow fewer

    def note_update(self, num_tokens: int, now_s: float) -> None:
        """Take in that one of the continuations was updated with so many new tokens, at a monotonic time."""
        if num_tokens and self._first_token_s is None:
            self._first_token_s = now_s
        if not self.unfinished:
            self._finish_s = now_s
        if self.is_streamed or self._finish_s is not None:
            self._on_change(self)

    def abort(self) -> None:
        """End it with what it has."""
        for completion in self.unfinished:
            completion.abort()
        self._finish_s = time.monotonic()
        self._on_change(self)

    def fail(self, error: RayppError) -> None:
        """End it with an error."""
        self.error = error
        self._on_change(self)

    def output(self) -> RequestOutput:
        """Return what there is so far."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prepared.text,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[completion.output() for completion in self.completions],
            finished=self.is_ended,
            metrics=self._metrics(),
            prompt_logprobs=None if self._prompt_logprobs is None else self._prompt_logprobs.copy(),
        )

    @cached_property
    def _prompt_token_ids(self) -> list[int]:
        """The prompt as users see it: one list for all outputs, made for the first."""
        token_ids: list[int] = self.prompt_token_ids.tolist()
        return token_ids

    def _metrics(self) -> RequestMetrics:
        metrics = RequestMetrics(arrival_time_s=self._arrival_time_s)
        cached, preemptions, drafted, accepted, _ = zip(*(c.all_counters for c in self.completions), strict=True)
        metrics.num_cached_tokens, metrics.num_preemptions = cached[0], sum(preemptions)
        metrics.drafted_by_position, metrics.accepted_by_position = sum_by_position(drafted), sum_by_position(accepted)
        metrics.num_draft_tokens = sum(metrics.drafted_by_position)
        metrics.num_accepted_tokens = sum(metrics.accepted_by_position)
        if self._first_token_s is not None:
            metrics.queue_s = min((c.all_counters[4] for c in self.completions if c.token_ids), default=0) / 1e6
            metrics.ttft_s = self._first_token_s - self._arrival_s
            metrics.first_token_time_s = self._arrival_time_s + metrics.ttft_s
        if self._finish_s is not None:
            metrics.finish_time_s = self._arrival_time_s + (self._finish_s - self._arrival_s)
            num_tokens = max(len(completion.token_ids) for completion in self.completions)
            if num_tokens > 1 and self._first_token_s is not None:
                metrics.tpot_s = (self._finish_s - self._first_token_s) / (num_tokens - 1)
        return metrics

"""One request on its way through the engine, as its client sees it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from raypp.api.detokenizer import Decoder
from raypp.api.request_text import RequestText
from raypp.errors import RayppError
from raypp.types import (
    CompletionOutput,
    FinishReason,
    FinishReasonName,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
)

_REASON_NAMES: dict[int, FinishReasonName] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
    FinishReason.ERROR: "error",
}


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that has been validated and tokenized, and not been sent yet."""

    request_id: str
    prompt: str | None  # None when it came as token ids
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int  # params.seed, or the one drawn for it


class RunningRequest:
    """Collects what the engine yields for one request, until it ends in a finish reason or an error.

    Text is made while the tokens come only where somebody needs it then: for streaming, or to look for stop strings.
    Otherwise the tokens are decoded once, at the end.
    """

    def __init__(
        self,
        prepared: PreparedRequest,
        handle: int,
        decoder: Decoder | None,
        *,
        stream: bool,
        on_change: Callable[[RunningRequest], None],
    ) -> None:
        """Begin the request's clock.

        Args:
            prepared: What is sent.
            handle: The number that outputs name it by.
            decoder: Makes its text; None leaves it empty.
            stream: Whether outputs are asked for before the end.
            on_change: Called when there is something to see: with every update when streaming, else at the end.
        """
        stops = prepared.params.stop
        self.request_id = prepared.request_id
        self.handle = handle
        self.token_ids: list[int] = []
        self.finish_reason: FinishReasonName | None = None
        self.stop_reason: int | str | None = None
        self.error: RayppError | None = None
        self.metrics = RequestMetrics(arrival_time_s=time.time())
        self._arrival_s = self._first_token_s = time.monotonic()
        self._prepared = prepared
        self._decoder = decoder
        self._text = RequestText(decoder, stops) if decoder is not None and (stream or stops) else None
        self._checks_stops = bool(stops)
        self._final_text = ""
        self._stream = stream
        self._on_change = on_change

    @property
    def is_ended(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None or self.error is not None

    def update(self, token_ids: list[int], reason: int, stop_token_id: int, now_s: float) -> None:
        """Take in what one step brought.

        Args:
            token_ids: New tokens. The token that ends a request with STOP is among them, but has no text.
            reason: FinishReason.
            stop_token_id: The entry of `stop_token_ids` that ended it, or -1.
            now_s: Monotonic time of arrival.
        """
        if token_ids and not self.token_ids:
            self._first_token_s = now_s
            self.metrics.ttft_s = now_s - self._arrival_s
            self.metrics.first_token_time_s = self.metrics.arrival_time_s + self.metrics.ttft_s
        if self._text is not None:
            stop = self._add_with_text(self._text, token_ids, reason)
            if stop is not None:
                self._end("stop", stop, now_s)
                return
        else:
            self.token_ids += token_ids
        if reason:
            self._end(_REASON_NAMES[reason], stop_token_id if stop_token_id >= 0 else None, now_s)
        elif self._stream:
            self._on_change(self)

    def count(self, num_cached: int, num_preemptions: int, num_drafted: int, num_accepted: int) -> None:
        """Take in the engine's counters of this request."""
        metrics = self.metrics
        metrics.num_cached_tokens = num_cached
        metrics.num_preemptions = num_preemptions
        metrics.num_draft_tokens = num_drafted
        metrics.num_accepted_tokens = num_accepted

    def abort(self) -> None:
        """End it with what it has."""
        if self._text is not None:
            self._text.finish()
        self._end("abort", None, time.monotonic())

    def fail(self, error: RayppError) -> None:
        """End it with an error."""
        self.error = error
        self._on_change(self)

    def output(self) -> RequestOutput:
        """Return what there is so far."""
        prepared = self._prepared
        completion = CompletionOutput(
            index=0,
            text=self._text.visible if self._text is not None else self._final_text,
            token_ids=self.token_ids.copy(),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
        return RequestOutput(
            request_id=self.request_id,
            prompt=prepared.prompt,
            prompt_token_ids=prepared.prompt_token_ids,
            outputs=[completion],
            finished=self.is_ended,
            metrics=replace(self.metrics),
        )

    def _add_with_text(self, text: RequestText, token_ids: list[int], reason: int) -> str | None:
        """Take in tokens and their text; return the stop string that ends it. Tokens after that one are dropped."""
        num_with_text = len(token_ids) - 1 if reason == FinishReason.STOP else len(token_ids)
        if self._checks_stops:
            for index, token_id in enumerate(token_ids[:num_with_text]):
                stop = text.add((token_id,))
                if stop is not None:
                    self.token_ids += token_ids[: index + 1]
                    return stop
        else:
            text.add(token_ids[:num_with_text])
        self.token_ids += token_ids
        return text.finish() if reason else None

    def _end(self, reason: FinishReasonName, stop_reason: int | str | None, now_s: float) -> None:
        self.finish_reason = reason
        self.stop_reason = stop_reason
        if self._text is None and self._decoder is not None:
            self._final_text = self._decoder.decode(self.token_ids[:-1] if reason == "stop" else self.token_ids)
        metrics, num_tokens = self.metrics, len(self.token_ids)
        metrics.finish_time_s = metrics.arrival_time_s + (now_s - self._arrival_s)
        if num_tokens > 1:
            metrics.tpot_s = (now_s - self._first_token_s) / (num_tokens - 1)
        self._on_change(self)

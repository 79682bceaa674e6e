"""One request on its way through the engine, as its client sees it: its continuations, its clock, its end.

What engines count of a request begins at zero in each of them, and a request may have had several. A request that is
handed to an engine, new or begun, becomes one `Request` per continuation here (`messages_of_new`, `messages_of_begun`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate, count, repeat, zip_longest
from typing import NamedTuple

from raypp.api.request_text import Decoder, Detokenizer, RequestText, StopScope, WholeText
from raypp.client_messages import AddRequests
from raypp.errors import RayppError
from raypp.messages import Int32s, OutputBatch, OutputLogprobs, TokenLogprobs, unpack
from raypp.request import Request
from raypp.types import (
    CompletionOutput,
    FinishReason,
    FinishReasonName,
    Logprob,
    Logprobs,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
)


class LogprobLists(NamedTuple):
    """Log-probabilities of n consecutive tokens of a request; see `raypp.messages.TokenLogprobs`."""

    token_ids: list[list[int]]
    logprobs: list[list[float]]
    ranks: list[int]


OfRequest = tuple[LogprobLists | None, LogprobLists | None]
"""Of its new tokens, and of its next prompt tokens."""

_NOTHING: OfRequest = (None, None)


def logprobs_per_request(batch: OutputBatch) -> Iterator[OfRequest]:
    """Yield what the message holds for each of its requests, in order."""
    if not len(batch.logprobs):
        return repeat(_NOTHING, len(batch.handles))
    message = unpack(OutputLogprobs, batch.logprobs.data)
    output = TokenLogprobs(message.token_ids, message.logprobs, message.ranks)
    prompt = TokenLogprobs(message.prompt_token_ids, message.prompt_logprobs, message.prompt_ranks)
    return zip(
        _split(message.counts.tolist(), message.widths.tolist(), output),
        _split(message.prompt_counts.tolist(), message.prompt_widths.tolist(), prompt),
        strict=True,
    )


def decoded_logprobs(lists: LogprobLists, decoder: Decoder | None) -> list[Logprobs]:
    """Return the log-probabilities of consecutive tokens, one dict for each.

    Args:
        lists: In column 0 the token that is there, then the most likely ones.
        decoder: Gives the tokens their text; None leaves it out.
    """
    decoded = []
    for token_ids, logprobs, own_rank in zip(*lists, strict=True):
        texts = repeat(None) if decoder is None else map(decoder.token_text, token_ids)
        of_position: Logprobs = dict(zip(token_ids, map(Logprob, logprobs, count(), texts), strict=False))
        # The token itself has its own rank, also where it is among the most likely ones.
        own = of_position[token_ids[0]]
        of_position[token_ids[0]] = Logprob(own.logprob, own_rank, own.decoded_token)
        decoded.append(of_position)
    return decoded


def _split(counts: Sequence[int], widths: Sequence[int], columns: TokenLogprobs) -> Iterator[LogprobLists | None]:
    most, (token_ids, logprobs, ranks) = columns.token_ids.shape[1], (column.tolist() for column in columns)
    start = 0
    for num_tokens, width in zip(counts, widths, strict=True):
        if not num_tokens:
            yield None
            continue
        of_request = slice(start, start + num_tokens)
        start += num_tokens
        own_ids, own_logprobs = token_ids[of_request], logprobs[of_request]
        if width < most:
            own_ids, own_logprobs = [row[:width] for row in own_ids], [row[:width] for row in own_logprobs]
        yield LogprobLists(own_ids, own_logprobs, ranks[of_request])


Counters = tuple[int, int, list[int], list[int], int]
"""Cached tokens, preemptions, drafted and accepted tokens by position, and microseconds queued, so far."""

NOTHING_COUNTED: Counters = (0, 0, [], [], 0)
"""Of a request that an engine has told nothing of."""


def sum_over_engines(earlier: Counters | None, now: Counters, waited_us: int) -> Counters:
    """Return the counters of a request. What it found cached, and how long it queued, are those of its first run.

    Args:
        earlier: The sum over the engines that had it before, if one of them ran it.
        now: Of the engine that has it now.
        waited_us: Microseconds before it was handed to that engine, if none ran it before.
    """
    if earlier is None:
        return *now[:4], waited_us + now[4]
    drafted, accepted = sum_by_position((earlier[2], now[2])), sum_by_position((earlier[3], now[3]))
    return earlier[0], earlier[1] + now[1], drafted, accepted, earlier[4]


def sum_by_position(lists: Iterable[Sequence[int]]) -> list[int]:
    """Return the sums by position; lists that are shorter have nothing there."""
    return [sum(column) for column in zip_longest(*lists, fillvalue=0)]


_REASON_NAMES: dict[int, FinishReasonName] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
    FinishReason.ERROR: "error",
}


class RunningCompletion:
    """Collects what the engine yields for one continuation, until a finish reason.

    Text is made while the tokens come only where it is needed then: for streaming, or to look for stop strings.
    Otherwise the tokens are decoded once, at the end.
    """

    def __init__(
        self,
        index: int,
        engine_id: str,
        handle: int,
        params: SamplingParams,
        decoder: Decoder | None,
        prompt: Int32s,
        make_stop_scope: Callable[[], StopScope] = WholeText,
        *,
        streams: bool,
    ) -> None:
        """Begin empty.

        Args:
            index: Its place among the continuations of its request.
            engine_id: Its name in the engine.
            handle: The number that outputs name it by.
            params: Of its request.
            decoder: Makes its text; None leaves it empty.
            prompt: The tokens [P] that it continues.
            make_stop_scope: Of which parts of its text stop strings are about.
            streams: Whether its text is asked for before the end.
        """
        self.index = index
        self.engine_id = engine_id
        self.handle = handle
        self.token_ids: list[int] = []
        self.finish_reason: FinishReasonName | None = None
        self.stop_reason: int | str | None = None
        self.counters: Counters = NOTHING_COUNTED
        """Of the engine that has it now."""
        self._earlier: Counters | None = None  # of the engines before, if one of them ran it
        self._waited_us = 0  # before the engine that was the first to run it, or has it now
        self._params = params
        self._decoder = decoder
        self._prompt = prompt
        self._make_stop_scope = make_stop_scope
        self._text = self._empty_text() if streams or params.stop else None
        self._logprobs: list[Logprobs] | None = None if params.logprobs is None else []
        self._taken = (0, 0)  # characters and tokens that `output` has given as new
        self._logprob_sums = [0.0]  # of the first tokens' log-probabilities

    @property
    def is_ended(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None

    @property
    def all_counters(self) -> Counters:
        """The counters of all engines that have had it."""
        if self._earlier is None and not self._waited_us:
            return self.counters
        return sum_over_engines(self._earlier, self.counters, self._waited_us)

    def begin_anew(self, waited_us: int) -> list[int]:
        """Take in that another engine goes on with it; return a copy of the tokens that it has.

        Args:
            waited_us: Microseconds since its request came.
        """
        if self.counters is not NOTHING_COUNTED:
            self._earlier, self.counters = self.all_counters, NOTHING_COUNTED
        if self._earlier is None:
            self._waited_us = waited_us
        return self.token_ids.copy()

    def update(self, token_ids: list[int], reason: int, stop_token_id: int, logprobs: LogprobLists | None) -> None:
        """Take in what one step brought.

        Args:
            token_ids: New tokens, the one that ends it with STOP among them.
            reason: FinishReason.
            stop_token_id: The entry of `stop_token_ids` that ended it, or -1.
            logprobs: Of the new tokens, if they were asked for.
        """
        if self._logprobs is not None and logprobs is not None:
            self._logprobs += decoded_logprobs(logprobs, self._decoder)
            own = [of_token[0] for of_token in logprobs.logprobs]
            self._logprob_sums += list(accumulate(own, initial=self._logprob_sums[-1]))[1:]
        if self._text is not None:
            stop = self._add_with_text(self._text, token_ids, reason)
            if stop is not None:
                self._end("stop", stop)
                return
        else:
            self.token_ids += token_ids
        if reason:
            self._end(_REASON_NAMES[reason], stop_token_id if stop_token_id >= 0 else None)

    def abort(self) -> None:
        """End it with what it has."""
        if self._text is not None:
            self._text.finish(may_stop=False)
        self._end("abort", None)

    def output(self, *, only_new: bool = False) -> CompletionOutput:
        """Return what there is so far; `only_new`: the text and the tokens that are new since the last such call."""
        num_tokens = len(self.token_ids)  # a stop string may have ended it before the last that were reported
        text = "" if self._text is None else self._text.visible
        num_chars, first = self._taken if only_new else (0, 0)
        self._taken = (len(text), num_tokens) if only_new else self._taken
        logprobs = None if self._logprobs is None else self._logprobs[first:num_tokens]
        return CompletionOutput(
            index=self.index,
            text=text[num_chars:],
            token_ids=self.token_ids[first:],
            cumulative_logprob=None if logprobs is None else self._logprob_sums[num_tokens],
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _empty_text(self) -> RequestText | None:
        if self._decoder is None or not self._params.detokenize:
            return None
        detokenizer = Detokenizer.of_continuation(self._decoder, self._params, self._prompt)
        return RequestText(
            detokenizer,
            self._params.stop,
            include_stop=self._params.include_stop_str_in_output,
            scope=self._make_stop_scope(),
        )

    def _add_with_text(self, text: RequestText, token_ids: list[int], reason: int) -> str | None:
        """Take in tokens and their text; return the stop string that ends it. Tokens after that one are dropped."""
        num_with_text = self._num_with_text(token_ids, reason)
        if self._params.stop:
            for index, token_id in enumerate(token_ids[:num_with_text]):
                stop = text.add((token_id,), may_stop=len(self.token_ids) + index >= self._params.min_tokens)
                if stop is not None:
                    self.token_ids += token_ids[: index + 1]
                    return stop
        else:
            text.add(token_ids[:num_with_text])
        self.token_ids += token_ids
        return text.finish(may_stop=len(self.token_ids) > self._params.min_tokens) if reason else None

    def _num_with_text(self, token_ids: Sequence[int], reason: int | str) -> int:
        """Return how many of the last tokens have text: the one that ends it has none unless it is asked for."""
        ends_silently = reason in (FinishReason.STOP, "stop") and not self._params.include_stop_str_in_output
        return len(token_ids) - 1 if ends_silently else len(token_ids)

    def _end(self, reason: FinishReasonName, stop_reason: int | str | None) -> None:
        self.finish_reason = reason
        self.stop_reason = stop_reason
        if self._text is None and (text := self._empty_text()) is not None:
            text.add(self.token_ids[: self._num_with_text(self.token_ids, reason)])
            text.finish()
            self._text = text


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
            self._prompt_logprobs[start : self._num_prompt_logprobs] = decoded  # what was seen stays

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

    def output(self, *, only_new: bool = False) -> RequestOutput:
        """Return what there is so far; `only_new`: of the continuations, what is new since the last such call."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prepared.text,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[completion.output(only_new=only_new) for completion in self.completions],
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


_REQUESTS_PER_MESSAGE = 16
"""The driver reads a message's header at once, between two steps. The continuations of one prompt stay together."""


def messages_of_new(requests: Iterable[RunningRequest]) -> Iterator[AddRequests]:
    """Yield what hands new requests to the engine, in order."""
    return _messages([_to_add(r, c, [], lacks_prompt_logprobs=True) for c in r.completions] for r in requests)


def messages_of_begun(
    completions: Iterable[tuple[RunningRequest, RunningCompletion]],
    max_running: int,
    *,
    goes_first: bool = False,
) -> Iterator[AddRequests]:
    """Yield what hands unfinished continuations to another engine, in order.

    The first message has all that can run at once: an engine that computes nothing takes a message in as a whole, so
    its first steps are the same each time the same requests are handed over. Requests with images wait for encoders
    anyway, and their pixels are large: they come in messages of a few.

    Args:
        completions: Each with its request.
        max_running: The engine's rows.
        goes_first: Whether they are served before all others, whatever their priority.
    """
    for message in _messages(
        ([_to_add(r, c, r.begin_anew(c), lacks_prompt_logprobs=r.lacks_prompt_logprobs)] for r, c in completions),
        most_in_first=max(max_running, _REQUESTS_PER_MESSAGE),
    ):
        for request in message.requests:
            request.goes_first = goes_first
        yield message


def _messages(groups: Iterable[Sequence[Request]], most_in_first: int = _REQUESTS_PER_MESSAGE) -> Iterator[AddRequests]:
    together: list[Request] = []
    most = most_in_first
    for group in groups:
        if any(request.items is not None for request in group):
            most = _REQUESTS_PER_MESSAGE
        if together and len(together) + len(group) > most:
            yield AddRequests(together)
            together, most = [], _REQUESTS_PER_MESSAGE
        together += group
    if together:
        yield AddRequests(together)


def _to_add(
    request: RunningRequest, completion: RunningCompletion, output_token_ids: list[int], *, lacks_prompt_logprobs: bool
) -> Request:
    """Return a continuation as the engine gets it: as a request of its own."""
    prepared, params = request.prepared, request.params
    if params.prompt_logprobs is not None and (completion.index > 0 or not lacks_prompt_logprobs):
        params = replace(params, prompt_logprobs=None)  # the first one brings them, once
    return replace(
        prepared.request,
        request_id=completion.engine_id,
        params=params,
        seed=prepared.seed_of(completion.index),
        handle=completion.handle,
        is_streamed=request.is_streamed or bool(params.stop),
        output_token_ids=output_token_ids,
    )

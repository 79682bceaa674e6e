"""One continuation on its way through the engine, as its client sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from raypp.api.detokenizer import Decoder, Detokenizer
from raypp.api.engine_counters import NOTHING_COUNTED, Counters, sum_over_engines
from raypp.api.output_logprobs import LogprobLists, decoded_logprobs
from raypp.api.request_text import RequestText
from raypp.api.stop import StopScope, WholeText
from raypp.messages import Int32s
from raypp.types import CompletionOutput, FinishReason, FinishReasonName, Logprobs, SamplingParams

_REASON_NAMES: dict[int, FinishReasonName] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
    FinishReason.ERROR: "error",
}


class RunningCompletion:
    """Collects what the engine yields for one continuation, until a finish reason.

    Text is made while the tokens come only where somebody needs it then: for streaming, or to look for stop strings.
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

    def output(self) -> CompletionOutput:
        """Return what there is so far."""
        num_tokens = len(self.token_ids)  # a stop string may have ended it before the last that were reported
        logprobs = None if self._logprobs is None else self._logprobs[:num_tokens]
        return CompletionOutput(
            index=self.index,
            text=self._text.visible if self._text is not None else "",
            token_ids=self.token_ids.copy(),
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

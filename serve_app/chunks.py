"""What is new in outputs as server-sent events: the chunks of OpenAI's streams, and the typed events of others."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from raypp.errors import RayppError
from raypp.openai_api.anthropic_answer import MessageBlocks, MessageDeltaUsage, PreparedMessage
from raypp.openai_api.error_bodies import describe_error
from raypp.openai_api.from_outputs import (
    Prepared,
    PreparedChat,
    PreparedCompletion,
    ResponseHead,
    TextLogprobs,
    chat_logprobs,
    prompt_logprobs,
    reason_of,
)
from raypp.openai_api.message_parser import MessageDelta, MessageParser
from raypp.openai_api.request_fields import StreamOptions
from raypp.openai_api.response_answer import Event, FaultCode, PreparedResponse, ResponseFault, ResponseObject
from raypp.types import CompletionOutput, RequestOutput
from serve_app.answers import error_event, message_error_event, typed_event

Outputs = AsyncGenerator[tuple[int, RequestOutput], None]
"""The index of a prompt, and what is new of its outputs; see `AsyncLLM.generate`."""

DONE = "data: [DONE]\n\n"

PreparedT = TypeVar("PreparedT", bound=PreparedMessage | PreparedResponse)


class EventWriter(ABC):
    """Writes the events of one answer."""

    def __init__(self) -> None:
        """Write nothing yet."""
        self._told: dict[int, RequestOutput] = {}  # by prompt, all that has come but for the texts

    async def events(self, outputs: Outputs) -> AsyncGenerator[str, None]:
        """Yield the whole stream. An error on the way is an event of the stream and ends it.

        Raises:
            RayppError: before anything was yielded.
        """
        try:
            async with aclosing(outputs):
                async for prompt_index, output in outputs:
                    if events := self._new_in(prompt_index, output):
                        yield events
        except RayppError as error:
            if not self._told:
                raise
            yield self.failure(error)
            return
        if end := self._end():
            yield end

    @abstractmethod
    def failure(self, error: RayppError) -> str:
        """Return the events with which an error ends the stream."""

    @abstractmethod
    def _new_in(self, prompt_index: int, output: RequestOutput) -> str:
        """Return the events of what is new in a prompt's outputs."""

    def _end(self) -> str:
        """Return what ends a stream without an error, behind the events of its outputs."""
        return ""

    def _with_new(self, prompt_index: int, new: RequestOutput) -> RequestOutput:
        """Return a prompt's outputs so far, tokens and all, but with the texts of the first."""
        told = self._told.setdefault(prompt_index, new)
        if told is not new:
            for one, more in zip(told.outputs, new.outputs, strict=True):
                one.token_ids += more.token_ids
                if one.logprobs is not None:
                    one.logprobs += more.logprobs or ()
                one.finish_reason, one.stop_reason = more.finish_reason, more.stop_reason
            told.finished, told.metrics, told.prompt_logprobs = new.finished, new.metrics, new.prompt_logprobs
        return told


class TypedEventWriter(EventWriter, Generic[PreparedT]):
    """Writes events that are named by their type."""

    def __init__(self, head: ResponseHead, prepared: PreparedT) -> None:
        """Write nothing yet.

        Args:
            head: The answer's name.
            prepared: What the engine was asked for.
        """
        super().__init__()
        self._head = head
        self._prepared = prepared
        self._parser = prepared.chat.make_parser()
        self._num_events = 0

    def _read(self, new: CompletionOutput) -> MessageDelta:
        """Return what is new of the message."""
        return self._parser.feed(new.text, is_last=new.finish_reason is not None)

    def _written(self, events: Iterable[dict[str, Any]]) -> str:
        return "".join(map(self._event, events))

    def _event(self, event: dict[str, Any]) -> str:
        self._num_events += 1
        return typed_event(event)


@dataclass(slots=True)
class _Choice:
    """What of one choice has been sent."""

    parser: MessageParser | None = None  # of a chat's
    num_tokens: int = 0
    text_logprobs: TextLogprobs | None = None  # of a completion's
    is_begun: bool = False
    is_finished: bool = False


class ChunkWriter(EventWriter):
    """Writes the chunks of one response as server-sent events.

    They are written by hand: a chunk is a few dozen bytes, and a model object for each would cost more than its token.
    """

    def __init__(self, head: ResponseHead, prepared: Prepared, options: StreamOptions | None) -> None:
        """Write nothing yet.

        Args:
            head: The response's name.
            prepared: What the engine was asked for.
            options: What else the stream holds.
        """
        super().__init__()
        self._make_parser = prepared.make_parser if isinstance(prepared, PreparedChat) else None
        self._is_echoed = isinstance(prepared, PreparedCompletion) and prepared.echo
        self._shown = prepared.shown
        self._usage_of = prepared.usage
        self._with_token_ids = prepared.return_token_ids
        name = "text_completion" if self._make_parser is None else "chat.completion.chunk"
        fields = {"id": head.id, "object": name, "created": head.created, "model": head.model}
        self._head = json.dumps(fields, separators=(",", ":"))[:-1]
        self._params = prepared.params
        self._names = prepared.names
        self._with_usage = options is not None and bool(options.include_usage)
        self._with_every_usage = options is not None and bool(options.continuous_usage_stats)
        self._choices: dict[int, _Choice] = {}

    def failure(self, error: RayppError) -> str:
        """Return the event with which an error ends the stream."""
        return error_event(error)

    def _new_in(self, prompt_index: int, output: RequestOutput) -> str:
        new = self._shown(output)
        texts = [completion.text for completion in new.outputs]
        told, first = self._with_new(prompt_index, new), prompt_index * len(texts)
        return "".join(
            self._event(first + completion.index, text, completion, told)
            for text, completion in zip(texts, told.outputs, strict=True)
        )

    def _end(self) -> str:
        usage = self._usage_of(list(self._told.values())).model_dump_json() if self._with_usage else None
        return (self._chunk("", usage) if usage else "") + DONE

    def _event(self, index: int, text: str, completion: CompletionOutput, output: RequestOutput) -> str:
        if index not in self._choices:
            self._choices[index] = _Choice(None if self._make_parser is None else self._make_parser())
        choice = self._choices[index]
        is_last = completion.finish_reason is not None
        delta = None if choice.parser is None else choice.parser.feed(text, is_last=is_last)
        has_news = bool(text) if delta is None else bool(delta)
        if choice.is_finished or not (has_news or is_last or not choice.is_begun):
            return ""
        fields = self._text_fields(index, choice, text, output, delta)
        fields["logprobs"] = self._logprobs(choice, completion, output)
        parser = choice.parser
        fields["finish_reason"] = completion.finish_reason if parser is None else reason_of(completion, parser)
        if completion.finish_reason:
            fields["stop_reason"] = completion.stop_reason
        if not choice.is_begun and output.prompt_logprobs is not None and not self._is_echoed:
            fields["prompt_logprobs"] = [
                at and {token_id: entry.model_dump() for token_id, entry in at.items()}
                for at in prompt_logprobs(output.prompt_logprobs)
            ]
        of_chunk: dict[str, Any] = {}  # a chat's prompt is the whole response's, a completion's that of its choice
        if self._with_token_ids:
            fields["token_ids"] = completion.token_ids[choice.num_tokens :]
            if not choice.is_begun:
                (fields if parser is None else of_chunk)["prompt_token_ids"] = output.prompt_token_ids
        choice.num_tokens = len(completion.token_ids)
        choice.is_begun, choice.is_finished = True, completion.finish_reason is not None
        usage = (
            self._usage_of([output]).model_dump_json() if self._with_every_usage else "null" if self._with_usage else ""
        )
        return self._chunk(json.dumps(fields, separators=(",", ":")), usage, of_chunk)

    def _chunk(self, choice: str, usage: str, more: Mapping[str, Any] = MappingProxyType({})) -> str:
        tail = f',"usage":{usage}' if usage else ""
        tail += "".join(f',"{name}":{json.dumps(value, separators=(",", ":"))}' for name, value in more.items())
        return f'data: {self._head},"choices":[{choice}]{tail}}}\n\n'

    def _text_fields(
        self, index: int, choice: _Choice, text: str, output: RequestOutput, delta: MessageDelta | None
    ) -> dict[str, Any]:
        if delta is not None:
            new = delta.plain(as_function_call=choice.parser is not None and choice.parser.as_function_call)
            if not choice.is_begun:
                new = {"role": "assistant", "content": ""} | new
            return {"index": index, "delta": new}
        if self._is_echoed and not choice.is_begun:
            text = (output.prompt or "") + text
        return {"index": index, "text": text}

    def _logprobs(self, choice: _Choice, completion: CompletionOutput, output: RequestOutput) -> dict[str, Any] | None:
        """Return those of the tokens that are new; with an echo, in the first chunk, of the prompt's tokens before."""
        if completion.logprobs is None:
            return None
        if choice.parser is not None:
            token_ids, logprobs = completion.token_ids[choice.num_tokens :], completion.logprobs[choice.num_tokens :]
            return chat_logprobs(token_ids, logprobs, self._params.logprobs or 0, self._names).model_dump()
        if choice.text_logprobs is None:
            choice.text_logprobs = TextLogprobs(self._params, self._names, output, echo=self._is_echoed)
        told = choice.text_logprobs.new_in(completion)
        return None if told is None else told.model_dump()


class MessageEventWriter(TypedEventWriter[PreparedMessage]):
    """Writes the events of one message, from `message_start` to `message_stop`."""

    def __init__(self, head: ResponseHead, prepared: PreparedMessage) -> None:
        """Write nothing yet."""
        super().__init__(head, prepared)
        self._blocks = MessageBlocks()

    def failure(self, error: RayppError) -> str:
        """Return the event with which an error ends the stream."""
        return message_error_event(error)

    def _new_in(self, prompt_index: int, output: RequestOutput) -> str:
        [new] = output.outputs
        delta, events, told = self._read(new), "", self._with_new(prompt_index, output)
        if not self._num_events:
            begun = self._answer(told) | {"stop_reason": None, "stop_sequence": None}
            events = self._written([{"type": "message_start", "message": begun}])
        events += self._written(self._blocks.add(delta))
        if new.finish_reason is not None:
            events += self._written(self._blocks.end())
            ended = self._answer(told)
            fields = {name: ended[name] for name in ("stop_reason", "stop_sequence", "stop_details", "container")}
            usage = {name: ended["usage"][name] for name in MessageDeltaUsage.model_fields}
            ending = {"type": "message_delta", "delta": fields, "usage": usage}
            events += self._written([ending, {"type": "message_stop"}])
        return events

    def _answer(self, output: RequestOutput) -> dict[str, Any]:
        """Return the answer without its blocks, which the events before have told."""
        return self._prepared.answer(self._head, output, self._parser, []).model_dump()


_FINAL = {"completed": "completed", "incomplete": "incomplete", "failed": "failed", "cancelled": "failed"}
"""The event that ends a stream, by the response's status."""
_CODES: Mapping[str, FaultCode] = {
    "invalid_request_error": "invalid_prompt",
    "rate_limit_error": "rate_limit_exceeded",
}
"""A response's own words for the types of errors."""


class ResponseEventWriter(TypedEventWriter[PreparedResponse]):
    """Writes the events of one response, numbered from 0. The last one holds the response as it is without a stream."""

    def __init__(self, head: ResponseHead, prepared: PreparedResponse) -> None:
        """Write nothing yet."""
        super().__init__(head, prepared)
        self._items = prepared.items()
        self._num_tokens = 0  # whose log-probabilities were told

    def failure(self, error: RayppError) -> str:
        """Return the events with which an error ends the stream."""
        _, body = describe_error(error)
        begin = "" if self._num_events else self._begin()
        ended = self._written(self._items.end(is_complete=False)) if self._items.items else ""
        fault = ResponseFault(code=_CODES.get(body.error.type, "server_error"), message=body.error.message)
        return begin + ended + self._final(self._prepared.failed(self._head, self._items, fault))

    def _new_in(self, prompt_index: int, output: RequestOutput) -> str:
        delta, told = self._read(output.outputs[0]), self._with_new(prompt_index, output)
        [completion] = told.outputs
        events = "" if self._num_events else self._begin()
        if delta:
            events += self._written(self._items.add(delta, self._logprobs(completion) if delta.content else []))
        if completion.finish_reason is not None:
            is_complete = completion.finish_reason == "stop"
            events += self._written(self._items.end(is_complete=is_complete, logprobs=self._logprobs(completion)))
            events += self._final(self._prepared.ended(self._head, self._items, told))
        return events

    def _logprobs(self, completion: CompletionOutput) -> list[dict[str, Any]]:
        """Return those of the tokens that are new since they were last told."""
        told, self._num_tokens = self._num_tokens, len(completion.token_ids)
        return self._prepared.logprobs(completion, told)

    def _begin(self) -> str:
        response = self._prepared.begun(self._head).model_dump()
        kinds = ("response.created", "response.in_progress")
        return self._written({"type": kind, "response": response} for kind in kinds)

    def _final(self, response: ResponseObject) -> str:
        return self._written([{"type": f"response.{_FINAL[response.status]}", "response": response.model_dump()}])

    def _event(self, event: Event) -> str:
        return super()._event({**event, "sequence_number": self._num_events})

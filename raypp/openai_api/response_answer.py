"""What a body of `/v1/responses` becomes: a chat for the engine, and the response that is made of its answer.

An item begins when its first text comes, and ends when the next item begins: a thought, a text, a call, in the order in
which the model wrote them.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field

from raypp.openai_api.from_outputs import ResponseHead, RetoldChat, chat_logprobs
from raypp.openai_api.message_parser import CallDelta, MessageDelta
from raypp.openai_api.request_fields import OpenAIModel
from raypp.openai_api.response_input import callable_tools, own_names
from raypp.openai_api.response_request import ResponseRequest
from raypp.openai_api.responses import TokenLogprob
from raypp.types import CompletionOutput, RequestOutput

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
FaultCode = Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]


class OutputText(OpenAIModel):
    """A text of the model's."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[dict[str, Any]]
    """Always empty."""
    logprobs: list[TokenLogprob]
    """Of the tokens that the model wrote; empty unless they were asked for."""


class OutputMessage(OpenAIModel):
    """What the model says."""

    type: Literal["message"] = "message"
    id: str
    role: Literal["assistant"] = "assistant"
    status: ItemStatus
    content: list[OutputText]


class OutputCall(OpenAIModel):
    """A function that the model calls."""

    type: Literal["function_call"] = "function_call"
    id: str
    call_id: str
    """What the function's output is sent back with."""
    namespace: str | None = Field(default=None, exclude_if=lambda namespace: namespace is None)
    """Where the function is in one."""
    name: str
    arguments: str
    """A JSON object as text."""
    status: ItemStatus


class OutputThought(OpenAIModel):
    """A text that the model thought."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputReasoning(OpenAIModel):
    """What the model thought before it answered."""

    type: Literal["reasoning"] = "reasoning"
    id: str
    summary: list[dict[str, Any]]
    """Always empty: thoughts come whole."""
    content: list[OutputThought]
    status: ItemStatus


OutputItem = Annotated[OutputMessage | OutputCall | OutputReasoning, Field(discriminator="type")]


class InputTokensDetails(OpenAIModel):
    """Where the input's tokens came from."""

    cached_tokens: int
    cache_write_tokens: int = 0
    """Always 0: what is written to the cache costs nothing."""


class OutputTokensDetails(OpenAIModel):
    """What the output's tokens are."""

    reasoning_tokens: int
    """Of thoughts."""


class ResponseUsage(OpenAIModel):
    """How many tokens a request had."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFault(OpenAIModel):
    """Why there is no answer."""

    code: FaultCode
    message: str


class IncompleteDetails(OpenAIModel):
    """Why the answer ended before its end."""

    reason: Literal["max_output_tokens"]


class ResponseObject(OpenAIModel):
    """The model's answer, and what was asked for."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    """Seconds since the epoch."""
    completed_at: int | None = None
    status: ResponseStatus
    error: ResponseFault | None = None
    incomplete_details: IncompleteDetails | None = None
    output: list[OutputItem]
    usage: ResponseUsage | None = None
    model: str
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    text: dict[str, Any]
    reasoning: dict[str, Any]
    truncation: Literal["disabled"] = "disabled"
    metadata: dict[str, str]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    service_tier: Literal["default"] = "default"
    background: Literal[False] = False
    store: Literal[False] = False
    """Responses are not kept, whatever was asked for."""
    previous_response_id: None = None


Event = dict[str, Any]
"""Without its `sequence_number`."""

_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
_ID_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class ResponseItems:
    """The items of one response."""

    def __init__(self, own_names: Mapping[str, Mapping[str, str]] = MappingProxyType({})) -> None:
        """Begin without any.

        Args:
            own_names: `namespace` and `name` of the functions in namespaces, by what the model calls them.
        """
        self._own_names = own_names
        self.items: list[dict[str, Any]] = []
        """What has begun; all but the last one are complete."""
        self._pieces: list[str] = []  # of the last item's text or arguments
        self._logprobs: list[dict[str, Any]] = []  # of its tokens
        self._is_open = False
        self._is_whole = True  # whether the last item is no call, or one that has come as a whole

    def add(self, delta: MessageDelta, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[Event]:
        """Add what is new, and yield the events that tell of it.

        Args:
            delta: What is new.
            logprobs: Of the tokens that came with it, in OpenAI's shape; they go with its first text.
        """
        for piece in delta.pieces:
            if isinstance(piece, CallDelta):
                yield from self._add_call(piece)
            elif piece[0] == "reasoning":
                yield from self._add_text("reasoning", piece[1])
            else:
                yield from self._add_text("message", piece[1], logprobs)
                logprobs = ()

    def end(self, *, is_complete: bool, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[Event]:
        """End the last item, and yield the events that tell of it.

        A response that ends by itself has an answer, if only an empty message: clients wait for one behind thoughts.

        Args:
            is_complete: Whether the model ended it. A call that lacks something is incomplete all the same.
            logprobs: Of the tokens behind the last text, which have none.
        """
        if not self.items or (is_complete and self.items[-1]["type"] == "reasoning"):
            yield from self._end_item()
            yield from self._begin("message")
        self._logprobs += logprobs
        yield from self._end_item("completed" if is_complete else "incomplete")

    def _add_text(self, kind: str, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[Event]:
        if not self._is_open or self.items[-1]["type"] != kind:
            yield from self._end_item()
            yield from self._begin(kind)
        self._pieces.append(text)
        event = {**self._place(f"response.{_PARTS[kind]}.delta"), "content_index": 0, "delta": text}
        if kind == "message":
            self._logprobs += logprobs
            event["logprobs"] = list(logprobs)
        yield event

    def _add_call(self, call: CallDelta) -> Iterator[Event]:
        if call.name is not None:
            yield from self._end_item()
            called = self._own_names.get(call.name, {"name": call.name})
            yield from self._begin("function_call", call_id=call.id, **called, arguments="")
        self._is_whole = call.is_whole
        if call.arguments:
            self._pieces.append(call.arguments)
            yield {**self._place("response.function_call_arguments.delta"), "delta": call.arguments}

    def _begin(self, kind: str, **fields: Any) -> Iterator[Event]:
        item = {"type": kind, "id": f"{_ID_PREFIXES[kind]}_{uuid.uuid4().hex}", **fields, "status": "in_progress"}
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        self.items.append(item)
        self._pieces, self._logprobs, self._is_open, self._is_whole = [], [], True, True
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": dict(item)}
        if kind in _PARTS:
            part = _part(kind, "", [])
            yield {**self._place("response.content_part.added"), "content_index": 0, "part": part}

    def _end_item(self, status: str = "completed") -> Iterator[Event]:
        if not self._is_open:
            return
        self._is_open = False
        item, text = self.items[-1], "".join(self._pieces)
        kind, item["status"] = item["type"], status if self._is_whole else "incomplete"
        if kind == "function_call":
            item["arguments"] = text
            done = self._place("response.function_call_arguments.done")
            yield {**done, "name": item["name"], "arguments": text}
        else:
            part = _part(kind, text, self._logprobs)
            item["content"] = [part]
            event = {**self._place(f"response.{_PARTS[kind]}.done"), "content_index": 0, "text": text}
            yield {**event, "logprobs": self._logprobs} if kind == "message" else event
            yield {**self._place("response.content_part.done"), "content_index": 0, "part": part}
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _place(self, kind: str) -> Event:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}


def _part(kind: str, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    part: dict[str, Any] = {"type": _PARTS[kind], "text": text}
    return {**part, "annotations": [], "logprobs": logprobs} if kind == "message" else part


_STATUSES: dict[str, ResponseStatus] = {
    "stop": "completed",
    "length": "incomplete",
    "abort": "cancelled",
    "error": "failed",
}
"""By why the engine ended the text."""


@dataclass(frozen=True)
class PreparedResponse(RetoldChat):
    """A conversation to be answered by a response."""

    request: ResponseRequest

    def response(self, head: ResponseHead, outputs: Sequence[RequestOutput]) -> ResponseObject:
        """Return the response of the finished output."""
        [output] = outputs
        [completion] = output.outputs
        items = self.items()
        new = items.add(self.chat.make_parser().feed(completion.text, is_last=True), self.logprobs(completion))
        for _ in chain(new, items.end(is_complete=completion.finish_reason == "stop")):
            pass
        return self.ended(head, items, output)

    def items(self) -> ResponseItems:
        """Return the items of the response, none so far."""
        return ResponseItems(own_names(self.request.tools))

    def logprobs(self, completion: CompletionOutput, num_told: int = 0) -> list[dict[str, Any]]:
        """Return the log-probabilities of the tokens behind the first `num_told`; nothing if none were asked for."""
        if completion.logprobs is None:
            return []
        token_ids, logprobs = completion.token_ids[num_told:], completion.logprobs[num_told:]
        told = chat_logprobs(token_ids, logprobs, self.params.logprobs or 0, self.chat.names)
        entries: list[dict[str, Any]] = told.model_dump()["content"]
        return entries

    def begun(self, head: ResponseHead) -> ResponseObject:
        """Return the response before there is anything in it."""
        return self._object(head, status="in_progress", output=[])

    def ended(self, head: ResponseHead, items: ResponseItems, output: RequestOutput) -> ResponseObject:
        """Return the response with all its items.

        Args:
            head: Its name.
            items: Ended.
            output: The engine's, finished.
        """
        [completion] = output.outputs
        status = _STATUSES[completion.finish_reason or "stop"]
        return self._object(
            head,
            status=status,
            completed_at=int(time.time()) if status == "completed" else None,
            incomplete_details=IncompleteDetails(reason="max_output_tokens") if status == "incomplete" else None,
            output=items.items,
            usage=self._usage(output),
        )

    def failed(self, head: ResponseHead, items: ResponseItems, fault: ResponseFault) -> ResponseObject:
        """Return the response that an error ended.

        Args:
            head: Its name.
            items: What there was before it, ended.
            fault: What went wrong.
        """
        return self._object(head, status="failed", output=items.items, error=fault)

    def _object(self, head: ResponseHead, **fields: Any) -> ResponseObject:
        request = self.request
        choice = request.tool_choice or "auto"
        wanted, reasoning = request.text_format, request.reasoning
        return ResponseObject(
            id=head.id,
            created_at=head.created,
            model=head.model,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            max_tool_calls=request.max_tool_calls,
            temperature=self.params.temperature,
            top_p=self.params.top_p,
            presence_penalty=self.params.presence_penalty,
            frequency_penalty=self.params.frequency_penalty,
            top_logprobs=self.params.logprobs or 0,
            tools=[tool.model_dump() for tool in callable_tools(request.tools)],
            tool_choice=choice if isinstance(choice, str) else choice.model_dump(),
            parallel_tool_calls=request.parallel_tool_calls is not False,
            text={"format": wanted.model_dump(exclude_none=True, by_alias=True)},
            reasoning={"effort": reasoning and reasoning.effort, "summary": None},
            metadata=request.metadata or {},
            user=request.user,
            safety_identifier=request.safety_identifier,
            prompt_cache_key=request.prompt_cache_key,
            **fields,
        )

    def _usage(self, output: RequestOutput) -> ResponseUsage:
        usage = self.chat.usage([output])
        cached, details = usage.prompt_tokens_details, usage.completion_tokens_details
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=cached.cached_tokens if cached else 0),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=details.reasoning_tokens if details else 0),
            total_tokens=usage.total_tokens,
        )

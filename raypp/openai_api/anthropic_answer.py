"""What `/v1/messages` answers: the shapes, and how they come from what the parser of a message finds.

A block begins when its first text comes, and ends when the next block begins: a thought, a text, a call, in the order
in which the model wrote them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from raypp.api.conversation import shown_arguments, unread_arguments
from raypp.openai_api.error_bodies import ErrorResponse
from raypp.openai_api.from_outputs import ResponseHead, RetoldChat, reason_of, usage_of
from raypp.openai_api.message_parser import CallDelta, MessageDelta, MessageParser
from raypp.openai_api.request_fields import OpenAIModel
from raypp.types import RequestOutput

Event = dict[str, Any]
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]

_STOP_REASONS: dict[str | None, StopReason] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
"""By a chat's own words."""
_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""What a block's new text comes as, by the block's type."""
_CONSTANTS: dict[str, dict[str, Any]] = {
    "text": {"citations": None},
    "thinking": {"signature": ""},
    "tool_use": {"caller": {"type": "direct"}},
}
"""What all blocks of a type have."""
_ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class OutputText(OpenAIModel):
    """A text of the model's."""

    type: Literal["text"]
    text: str
    citations: None
    """There are no documents to cite."""


class OutputThinking(OpenAIModel):
    """What the model thought."""

    type: Literal["thinking"]
    thinking: str
    signature: str
    """Always empty."""


class OutputToolUse(OpenAIModel):
    """A tool that the model calls."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, str]
    """The model itself: `{"type": "direct"}`."""


OutputBlock = Annotated[OutputText | OutputThinking | OutputToolUse, Field(discriminator="type")]


class OutputTokensDetails(OpenAIModel):
    """What the output's tokens are."""

    thinking_tokens: int
    """Of thoughts, their tags included."""


class MessageDeltaUsage(OpenAIModel):
    """How many tokens a request had, as the end of a stream tells."""

    input_tokens: int
    """Those that were not cached."""
    cache_creation_input_tokens: int = 0
    """Always 0: what is written to the cache costs nothing."""
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    server_tool_use: None = None
    """No tools run here."""


class MessageUsage(MessageDeltaUsage):
    """How many tokens a request had, and how it was served."""

    cache_creation: None = None
    inference_geo: None = None
    service_tier: Literal["standard"] = "standard"


class MessageAnswer(OpenAIModel):
    """The model's answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[OutputBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    stop_details: None = None
    """Of refusals, of which there are none."""
    container: None = None
    """Nothing is run here."""
    usage: MessageUsage


class TokenCount(OpenAIModel):
    """How long a prompt is."""

    input_tokens: int


class MessageFault(OpenAIModel):
    """What went wrong."""

    type: str
    message: str


class MessageErrorResponse(OpenAIModel):
    """The body of every response that is not a success."""

    type: Literal["error"] = "error"
    error: MessageFault


def message_error(status: int, body: ErrorResponse) -> MessageErrorResponse:
    """Return an error in Anthropic's shape, whose message begins with the field at fault.

    Args:
        status: Of HTTP.
        body: The error in OpenAI's shape.
    """
    kind = _ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    where = f"{body.error.param}: " if body.error.param else ""
    return MessageErrorResponse(error=MessageFault(type=kind, message=where + body.error.message))


class MessageBlocks:
    """The blocks of one answer, and the events that tell of them."""

    def __init__(self) -> None:
        """Begin without any."""
        self.blocks: list[dict[str, Any]] = []
        """What has begun; all but the last one are complete."""
        self._pieces: list[str] = []  # of the last block's text or input
        self._is_whole = False  # whether it is a call whose input has come as a whole
        self._is_open = False

    def add(self, delta: MessageDelta) -> Iterator[Event]:
        """Add what is new, and yield the events that tell of it."""
        for piece in delta.pieces:
            if isinstance(piece, CallDelta):
                text = piece.arguments
                if piece.name is not None:
                    yield from self._begin("tool_use", id=piece.id, name=piece.name, input={})
                self._is_whole = piece.is_whole
            else:
                kind, text = "text" if piece[0] == "content" else "thinking", piece[1]
                if not self._is_open or self.blocks[-1]["type"] != kind:
                    yield from self._begin(kind, **{kind: ""})
            if text:
                self._pieces.append(text)
                name, field = _DELTAS[self.blocks[-1]["type"]]
                yield self._event("content_block_delta", delta={"type": name, field: text})

    def end(self) -> Iterator[Event]:
        """End the last block, and yield the event that tells of it."""
        if self._is_open:
            block, text = self.blocks[-1], "".join(self._pieces)
            self._is_open = False
            if block["type"] == "tool_use":
                block["input"] = shown_arguments(text) if self._is_whole else unread_arguments(text)
            else:
                block[block["type"]] = text
            yield self._event("content_block_stop")

    def _begin(self, kind: str, **fields: Any) -> Iterator[Event]:
        yield from self.end()
        block = {"type": kind, **fields, **_CONSTANTS[kind]}
        self.blocks.append(block)
        self._pieces, self._is_open = [], True
        yield self._event("content_block_start", content_block=dict(block))

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "index": len(self.blocks) - 1, **fields}


@dataclass(frozen=True)
class PreparedMessage(RetoldChat):
    """A conversation to be answered by a message."""

    def response(self, head: ResponseHead, outputs: Sequence[RequestOutput]) -> MessageAnswer:
        """Return the answer of the finished output."""
        [output] = outputs
        parser, blocks = self.chat.make_parser(), MessageBlocks()
        delta = parser.feed(output.outputs[0].text, is_last=True)
        for _ in (*blocks.add(delta), *blocks.end()):
            pass
        return self.answer(head, output, parser, blocks.blocks)

    def answer(
        self, head: ResponseHead, output: RequestOutput, parser: MessageParser, blocks: list[Any]
    ) -> MessageAnswer:
        """Return an answer, finished or not.

        Args:
            head: Its name.
            output: The engine's.
            parser: Which has read it.
            blocks: Those that it tells, of `MessageBlocks`.
        """
        [completion] = output.outputs
        reason, usage = reason_of(completion, parser), usage_of([output])
        is_sequence = reason == "stop" and isinstance(completion.stop_reason, str)
        num_cached = output.metrics.num_cached_tokens
        return MessageAnswer(
            id=head.id,
            model=head.model,
            content=blocks,
            stop_reason="stop_sequence" if is_sequence else _STOP_REASONS.get(reason),
            stop_sequence=str(completion.stop_reason) if is_sequence else None,
            usage=MessageUsage(
                input_tokens=usage.prompt_tokens - num_cached,
                cache_read_input_tokens=num_cached,
                output_tokens=usage.completion_tokens,
                output_tokens_details=OutputTokensDetails(thinking_tokens=self.chat.num_reasoning(completion)),
            ),
        )

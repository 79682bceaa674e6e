"""Outputs so far to the events of a stream of `/v1/messages`."""

from __future__ import annotations

from typing import Any

from raypp.errors import RayppError
from raypp.openai_api.anthropic_answer import MessageBlocks, MessageDeltaUsage, PreparedMessage
from raypp.openai_api.from_outputs import ResponseHead
from raypp.types import RequestOutput
from serve_app.client_connection import message_error_event
from serve_app.typed_events import TypedEventWriter


class MessageEventWriter(TypedEventWriter):
    """Writes the events of one message, from `message_start` to `message_stop`."""

    def __init__(self, head: ResponseHead, prepared: PreparedMessage) -> None:
        """Write nothing yet.

        Args:
            head: The answer's name.
            prepared: What the engine was asked for.
        """
        super().__init__(prepared.chat.make_parser())
        self._head = head
        self._prepared = prepared
        self._blocks = MessageBlocks()

    def failure(self, error: RayppError) -> str:
        """Return the event with which an error ends the stream."""
        return message_error_event(error)

    def _new_in(self, output: RequestOutput) -> str:
        events = ""
        if not self._num_events:
            begun = self._answer(output) | {"stop_reason": None, "stop_sequence": None}
            events = self._written([{"type": "message_start", "message": begun}])
        events += self._written(self._blocks.add(self._read(output.outputs[0])))
        if output.outputs[0].finish_reason is not None:
            events += self._written(self._blocks.end())
            ended = self._answer(output)
            delta = {name: ended[name] for name in ("stop_reason", "stop_sequence", "stop_details", "container")}
            usage = {name: ended["usage"][name] for name in MessageDeltaUsage.model_fields}
            told = {"type": "message_delta", "delta": delta, "usage": usage}
            events += self._written([told, {"type": "message_stop"}])
        return events

    def _answer(self, output: RequestOutput) -> dict[str, Any]:
        """Return the answer without its blocks, which the events before have told."""
        return self._prepared.answer(self._head, output, self._parser, []).model_dump()

"""Outputs so far to the typed events of a response's stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raypp.errors import RayppError
from raypp.openai_api.error_bodies import describe_error
from raypp.openai_api.from_outputs import ResponseHead
from raypp.openai_api.response_answer import PreparedResponse
from raypp.openai_api.response_items import Event
from raypp.openai_api.response_object import FaultCode, ResponseFault, ResponseObject
from raypp.types import CompletionOutput, RequestOutput
from serve_app.typed_events import TypedEventWriter

_FINAL = {"completed": "completed", "incomplete": "incomplete", "failed": "failed", "cancelled": "failed"}
"""The event that ends a stream, by the response's status."""
_CODES: Mapping[str, FaultCode] = {
    "invalid_request_error": "invalid_prompt",
    "rate_limit_error": "rate_limit_exceeded",
}
"""A response's own words for the types of errors."""


class ResponseEventWriter(TypedEventWriter):
    """Writes the events of one response, numbered from 0. The last one holds the response as it is without a stream."""

    def __init__(self, head: ResponseHead, prepared: PreparedResponse) -> None:
        """Write nothing yet.

        Args:
            head: The response's name.
            prepared: What the engine was asked for.
        """
        super().__init__(prepared.chat.make_parser())
        self._head = head
        self._prepared = prepared
        self._items = prepared.items()
        self._num_tokens = 0  # whose log-probabilities were told

    def failure(self, error: RayppError) -> str:
        """Return the events with which an error ends the stream."""
        _, body = describe_error(error)
        begin = "" if self._num_events else self._begin()
        ended = self._written(self._items.end(is_complete=False)) if self._items.items else ""
        fault = ResponseFault(code=_CODES.get(body.error.type, "server_error"), message=body.error.message)
        return begin + ended + self._final(self._prepared.failed(self._head, self._items, fault))

    def _new_in(self, output: RequestOutput) -> str:
        [completion] = output.outputs
        delta = self._read(completion)
        events = "" if self._num_events else self._begin()
        if delta:
            events += self._written(self._items.add(delta, self._logprobs(completion) if delta.content else []))
        if completion.finish_reason is not None:
            is_complete = completion.finish_reason == "stop"
            events += self._written(self._items.end(is_complete=is_complete, logprobs=self._logprobs(completion)))
            events += self._final(self._prepared.ended(self._head, self._items, output))
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

"""Outputs so far to the typed events of a stream: what those of all routes that have such events share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any

from raypp.errors import RayppError
from raypp.openai_api.message_parser import MessageDelta, MessageParser
from raypp.types import CompletionOutput, RequestOutput
from serve_app.chunks import Outputs
from serve_app.client_connection import typed_event


class TypedEventWriter(ABC):
    """Writes the events of one answer."""

    def __init__(self, parser: MessageParser) -> None:
        """Write nothing yet.

        Args:
            parser: Of the answer.
        """
        self._parser = parser
        self._num_events = 0
        self._num_chars = 0

    async def events(self, outputs: Outputs) -> AsyncGenerator[str, None]:
        """Yield the whole stream. An error on the way is told in the stream and ends it.

        Raises:
            RayppError: before anything was yielded.
        """
        try:
            async with aclosing(outputs):
                async for _, output in outputs:
                    if events := self._new_in(output):
                        yield events
        except RayppError as error:
            if not self._num_events:
                raise
            yield self.failure(error)

    @abstractmethod
    def failure(self, error: RayppError) -> str:
        """Return the events with which an error ends the stream."""

    @abstractmethod
    def _new_in(self, output: RequestOutput) -> str:
        """Return the events of what is new in the output."""

    def _read(self, completion: CompletionOutput) -> MessageDelta:
        """Return what is new of the message."""
        new = completion.text[self._num_chars :]
        self._num_chars = len(completion.text)
        return self._parser.feed(new, is_last=completion.finish_reason is not None)

    def _written(self, events: Iterable[dict[str, Any]]) -> str:
        return "".join(map(self._event, events))

    def _event(self, event: dict[str, Any]) -> str:
        self._num_events += 1
        return typed_event(event)

"""From what the parser of a message finds, as it comes, to the items of a response and the events that tell of them.

An item begins when its first text comes, and ends when the next item begins: a thought, a text, a call, in the order in
which the model wrote them.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from raypp.openai_api.message_parser import CallDelta, MessageDelta

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
        self._items: list[dict[str, Any]] = []
        self._pieces: list[str] = []  # of the last item's text or arguments
        self._logprobs: list[dict[str, Any]] = []  # of its tokens
        self._is_open = False
        self._is_whole = True  # whether the last item is no call, or one that has come as a whole

    @property
    def items(self) -> Sequence[dict[str, Any]]:
        """What has begun; all but the last one are complete."""
        return self._items

    def add(self, delta: MessageDelta, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[Event]:
        """Add what is new, and yield the events that tell of it.

        Args:
            delta: What is new.
            logprobs: Of the tokens that came with it, in OpenAI's shape; they go with its first text.
        """
        for piece in delta.in_order():
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
        if not self._items or (is_complete and self._items[-1]["type"] == "reasoning"):
            yield from self._end_item()
            yield from self._begin("message")
        self._logprobs += logprobs
        yield from self._end_item("completed" if is_complete else "incomplete")

    def _add_text(self, kind: str, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[Event]:
        if not self._is_open or self._items[-1]["type"] != kind:
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
        self._items.append(item)
        self._pieces, self._logprobs, self._is_open, self._is_whole = [], [], True, True
        yield {"type": "response.output_item.added", "output_index": len(self._items) - 1, "item": dict(item)}
        if kind in _PARTS:
            part = _part(kind, "", [])
            yield {**self._place("response.content_part.added"), "content_index": 0, "part": part}

    def _end_item(self, status: str = "completed") -> Iterator[Event]:
        if not self._is_open:
            return
        self._is_open = False
        item, text = self._items[-1], "".join(self._pieces)
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
        yield {"type": "response.output_item.done", "output_index": len(self._items) - 1, "item": item}

    def _place(self, kind: str) -> Event:
        return {"type": kind, "item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}


def _part(kind: str, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    part: dict[str, Any] = {"type": _PARTS[kind], "text": text}
    return {**part, "annotations": [], "logprobs": logprobs} if kind == "message" else part

"""From a model's text, as it comes, to what a message is made of: thoughts, content and tool calls."""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from raypp.openai_api.conventions import CALL, END_CALL, END_THINK, THINK
from raypp.openai_api.json_scanner import JsonScanner

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


@dataclass(slots=True)
class CallDelta:
    """What is new of one call."""

    index: int
    id: str | None = None  # with the first one
    name: str | None = None  # likewise
    arguments: str = ""

    def plain(self) -> dict[str, Any]:
        """Return it in OpenAI's shape."""
        if self.name is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


@dataclass(slots=True)
class MessageDelta:
    """What is new of a message."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)

    def plain(self) -> dict[str, Any]:
        """Return it in OpenAI's shape, without what is empty."""
        fields: dict[str, Any] = {}
        if self.reasoning:
            fields["reasoning_content"] = self.reasoning
        if self.content:
            fields["content"] = self.content
        if self.calls:
            fields["tool_calls"] = [call.plain() for call in self.calls]
        return fields


class _Place(Enum):
    START = auto()
    THOUGHT = auto()
    CONTENT = auto()
    CALL_HEAD = auto()
    ARGUMENTS = auto()
    CALL_END = auto()


class MessageParser:
    """Reads one message. White space around thoughts and calls belongs to neither."""

    def __init__(self, *, has_thoughts: bool, has_calls: bool, begins_in_thought: bool = False) -> None:
        """Begin before the first character.

        Args:
            has_thoughts: Whether a thought in front is one, or content.
            has_calls: Whether calls are looked for, else they are content.
            begins_in_thought: Whether the prompt has begun one.
        """
        self._has_calls = has_calls
        self._place = _Place.THOUGHT if begins_in_thought else _Place.START if has_thoughts else _Place.CONTENT
        self._rest = ""
        self._is_after_tag = begins_in_thought  # white space is still to be dropped
        self._arguments = JsonScanner()
        self.num_calls = 0

    def feed(self, text: str, *, is_last: bool = False) -> MessageDelta:
        """Read on; return what has become clear. With the last text, everything does."""
        self._rest += text
        delta = MessageDelta()
        while self._go_on(delta, is_last):
            pass
        return delta

    def _go_on(self, delta: MessageDelta, is_last: bool) -> bool:
        """Read one piece; return whether there may be another one."""
        match self._place:
            case _Place.START:
                return self._start(is_last)
            case _Place.THOUGHT:
                return self._think(delta, is_last)
            case _Place.CONTENT:
                return self._read_content(delta, is_last)
            case _Place.CALL_HEAD:
                return self._read_head(delta, is_last)
            case _Place.ARGUMENTS:
                return self._read_arguments(delta)
            case _:
                return self._end_call(is_last)

    def _start(self, is_last: bool) -> bool:
        text = self._rest.lstrip()
        if text.startswith(THINK):
            self._enter(_Place.THOUGHT, text[len(THINK) :])
            return True
        if not is_last and THINK.startswith(text):
            return False
        self._place = _Place.CONTENT
        return True

    def _think(self, delta: MessageDelta, is_last: bool) -> bool:
        before, tag, after = self._taken(END_THINK, is_last)
        delta.reasoning += before
        if tag:
            self._enter(_Place.CONTENT, after)
        return bool(tag)

    def _read_content(self, delta: MessageDelta, is_last: bool) -> bool:
        if not self._has_calls:
            delta.content += self._without_leading_space(self._rest)
            self._rest = ""
            return False
        before, tag, after = self._taken(CALL, is_last)
        delta.content += before
        if tag:
            self._enter(_Place.CALL_HEAD, after)
        return bool(tag)

    def _read_head(self, delta: MessageDelta, is_last: bool) -> bool:
        if (head := _HEAD.match(self._rest)) is not None:
            delta.calls.append(self._new_call(json.loads(head[1])))
            self._arguments = JsonScanner()
            self._enter(_Place.ARGUMENTS, self._rest[head.end() :], after_tag=False)
            return True
        inside, tag, after = self._rest.partition(END_CALL)
        if not tag and not is_last:
            return False
        call = _whole_call(inside) if tag else None
        if call is None:  # nothing that could be called: it stays text
            delta.content += CALL + inside + tag
        else:
            new = self._new_call(call[0])
            new.arguments = call[1]
            delta.calls.append(new)
        self._enter(_Place.CONTENT, after)
        return bool(tag)

    def _read_arguments(self, delta: MessageDelta) -> bool:
        num_chars = self._arguments.feed(self._rest)
        if num_chars:
            arguments, self._rest = self._rest[:num_chars], self._rest[num_chars:]
            if delta.calls and delta.calls[-1].index == self.num_calls - 1:
                delta.calls[-1].arguments += arguments
            else:
                delta.calls.append(CallDelta(self.num_calls - 1, arguments=arguments))
        if self._arguments.is_complete:
            self._place = _Place.CALL_END
        return self._arguments.is_complete

    def _end_call(self, is_last: bool) -> bool:
        _, tag, after = self._rest.partition(END_CALL)
        if tag:
            self._enter(_Place.CONTENT, after)
        return bool(tag)

    def _new_call(self, name: str) -> CallDelta:
        self.num_calls += 1
        return CallDelta(self.num_calls - 1, f"call_{uuid.uuid4().hex[:24]}", name)

    def _enter(self, place: _Place, rest: str, *, after_tag: bool = True) -> None:
        self._place, self._rest, self._is_after_tag = place, rest, after_tag

    def _taken(self, tag: str, is_last: bool) -> tuple[str, str, str]:
        """Take the text up to a tag, or what cannot belong to one any more; space before a tag belongs to nothing."""
        before, found, after = self._rest.partition(tag)
        if found:
            before = self._without_leading_space(before.rstrip())
            return before, found, after
        if is_last:
            before, self._rest = self._rest, ""
            if tag == END_THINK:
                before = before.rstrip()
            return self._without_leading_space(before), "", ""
        num_kept = next((n for n in range(min(len(tag) - 1, len(before)), 0, -1) if tag.startswith(before[-n:])), 0)
        end = len(before[: len(before) - num_kept].rstrip())
        before, self._rest = before[:end], before[end:]
        return self._without_leading_space(before), "", ""

    def _without_leading_space(self, text: str) -> str:
        if self._is_after_tag:
            text = text.lstrip()
            self._is_after_tag = not text
        return text


def _whole_call(text: str) -> tuple[str, str] | None:
    """Return a call's name and arguments, however it is written; None if it is none."""
    try:
        call = json.loads(text, strict=False)
    except ValueError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    return call["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)

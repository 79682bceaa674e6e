"""From a model's text, as it comes, to what a message is made of: thoughts, content and tool calls."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from raypp.openai_api.call_text import HEAD, OpenedCall, may_be_call
from raypp.openai_api.conventions import END_THINK, THINK, CallSyntax


@dataclass(slots=True)
class CallDelta:
    """What is new of one call."""

    index: int
    id: str | None = None  # with the first one
    name: str | None = None  # likewise
    arguments: str = ""
    num_chars_before: int = 0  # of the content that is new with it

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

    def plain(self, *, as_function_call: bool = False) -> dict[str, Any]:
        """Return it in OpenAI's shape, without what is empty.

        Args:
            as_function_call: Name the first call in the older form; it has no room for others.
        """
        fields: dict[str, Any] = {}
        if self.reasoning:
            fields["reasoning_content"] = self.reasoning
        if self.content:
            fields["content"] = self.content
        if as_function_call:
            if (first := next((call for call in self.calls if call.index == 0), None)) is not None:
                fields["function_call"] = first.plain()["function"]
        elif self.calls:
            fields["tool_calls"] = [call.plain() for call in self.calls]
        return fields


class _Place(Enum):
    START = auto()
    THOUGHT = auto()
    OPEN = auto()  # where a call may begin without a tag
    CONTENT = auto()
    CALL_HEAD = auto()
    ARGUMENTS = auto()
    CALL_END = auto()


class MessageParser:
    """Reads one message. White space around thoughts and calls belongs to neither."""

    def __init__(
        self,
        *,
        has_thoughts: bool,
        calls: CallSyntax | None,
        begins_in_thought: bool = False,
        is_continued: bool = False,
        must_call: bool = False,
        as_function_call: bool = False,
    ) -> None:
        """Begin before the first character.

        Args:
            has_thoughts: Whether a thought in front is one, or content.
            calls: How the calls that are looked for are written; None: what looks like one is content.
            begins_in_thought: Whether the prompt has begun one.
            is_continued: Whether the prompt has begun the message: its white space counts, and no thought comes first.
            must_call: Whether the text is held to calls: what is none is the beginning of one that was cut off.
            as_function_call: Whether calls are told in the older form; see `MessageDelta.plain`.
        """
        self.as_function_call = as_function_call
        self._calls = calls
        self._must_call = must_call
        first = _Place.CONTENT if is_continued else _Place.START if has_thoughts else self._behind_thoughts
        self._place = _Place.THOUGHT if begins_in_thought else first
        self._rest = ""
        self._is_after_tag = begins_in_thought and not is_continued  # white space is still to be dropped
        self._call: OpenedCall | None = None
        self.num_calls = 0

    def feed(self, text: str, *, is_last: bool = False) -> MessageDelta:
        """Read on; return what has become clear. With the last text, everything does."""
        self._rest += text
        delta = MessageDelta()
        while self._go_on(delta, is_last):
            pass
        if self._must_call:
            delta.content = ""
        return delta

    def _go_on(self, delta: MessageDelta, is_last: bool) -> bool:
        """Read one piece; return whether there may be another one."""
        match self._place:
            case _Place.START:
                return self._start(is_last)
            case _Place.THOUGHT:
                return self._think(delta, is_last)
            case _Place.OPEN:
                return self._open(is_last)
            case _Place.CONTENT:
                return self._read_content(delta, is_last)
        assert self._call is not None
        match self._place:
            case _Place.CALL_HEAD:
                return self._read_head(delta, self._call, is_last)
            case _Place.ARGUMENTS:
                return self._read_arguments(delta, self._call)
            case _:
                return self._end_call(self._call)

    def _start(self, is_last: bool) -> bool:
        text = self._rest.lstrip()
        if text.startswith(THINK):
            self._enter(_Place.THOUGHT, text[len(THINK) :])
            return True
        if not is_last and THINK.startswith(text):
            return False
        self._place = self._behind_thoughts
        return True

    def _think(self, delta: MessageDelta, is_last: bool) -> bool:
        before, tag, after = self._taken(END_THINK, is_last)
        delta.reasoning += before
        if tag:
            self._enter(self._behind_thoughts, after)
        return bool(tag)

    @property
    def _behind_thoughts(self) -> _Place:
        return _Place.OPEN if self._calls is not None and not self._calls.end_tag else _Place.CONTENT

    def _open(self, is_last: bool) -> bool:
        """Find out whether a call comes next: a tag, or the brace of one."""
        assert self._calls is not None
        text = self._rest.lstrip(" \t\r\n;" if self.num_calls else None)  # ; is what Llama puts between calls
        is_call: bool | None = text.startswith(self._calls.tag)
        if not is_call:
            is_call = None if self._calls.tag.startswith(text) else may_be_call(text)
        if is_call is None and not is_last:
            return False
        if is_call:
            tag = self._calls.tag if text.startswith(self._calls.tag) else ""
            opening = self._rest[: len(self._rest) - len(text)] + tag
            self._begin_call(opening, text[len(tag) :])
        else:
            self._place = _Place.CONTENT
        return True

    def _read_content(self, delta: MessageDelta, is_last: bool) -> bool:
        if self._calls is None:
            delta.content += self._without_leading_space(self._rest)
            self._rest = ""
            return False
        before, tag, after = self._taken(self._calls.tag, is_last)
        delta.content += before
        if tag:
            self._begin_call(tag, after)
        return bool(tag)

    def _begin_call(self, opening: str, rest: str) -> None:
        assert self._calls is not None
        self._call = OpenedCall(self._calls, opening)
        self._enter(_Place.CALL_HEAD, rest)

    def _read_head(self, delta: MessageDelta, opened: OpenedCall, is_last: bool) -> bool:
        if (head := HEAD.match(self._rest)) is not None:
            delta.calls.append(self._new_call(delta, json.loads(head[1])))
            self._enter(_Place.ARGUMENTS, self._rest[head.end() :], after_tag=False)
            return True
        whole = opened.take_whole(self._rest)
        if whole is None and not is_last:
            return False
        inside, after = (self._rest, "") if whole is None else whole
        call = None if whole is None else opened.parse(inside)
        if call is None:  # nothing that could be called: it stays text
            delta.content += self._without_leading_space(opened.opening + inside)
            self._enter(_Place.CONTENT, after, after_tag=False)
        else:
            new = self._new_call(delta, call[0])
            new.arguments = call[1]
            delta.calls.append(new)
            self._enter(self._behind_thoughts, after)
        return whole is not None

    def _read_arguments(self, delta: MessageDelta, opened: OpenedCall) -> bool:
        num_chars = opened.arguments.feed(self._rest)
        if num_chars:
            arguments, self._rest = self._rest[:num_chars], self._rest[num_chars:]
            if delta.calls and delta.calls[-1].index == self.num_calls - 1:
                delta.calls[-1].arguments += arguments
            else:
                before = len(delta.content)
                delta.calls.append(CallDelta(self.num_calls - 1, arguments=arguments, num_chars_before=before))
        if opened.arguments.is_complete:
            self._place = _Place.CALL_END
        return opened.arguments.is_complete

    def _end_call(self, opened: OpenedCall) -> bool:
        after = opened.after_end(self._rest)
        if after is not None:
            self._enter(self._behind_thoughts, after)
        return after is not None

    def _new_call(self, delta: MessageDelta, name: str) -> CallDelta:
        self.num_calls += 1
        call_id = f"call_{uuid.uuid4().hex[:24]}"
        return CallDelta(self.num_calls - 1, call_id, name, num_chars_before=len(delta.content))

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

"""From a model's text, as it comes, to what a message is made of: thoughts, content and tool calls."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from string import ascii_letters, digits
from types import MappingProxyType
from typing import Any, Literal

from pydantic_core import from_json

from raypp.api.conversation import arguments_object
from raypp.openai_api.syntax import (
    ArgumentsReader,
    CallSyntax,
    Found,
    JsonArguments,
    JsonScanner,
    MarkFinder,
    ThoughtSyntax,
    marks,
)

_HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?'
    r'"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
"""What nearly every call begins with, up to the brace of its arguments: from there on they are streamed."""

_FIRST_KEYS = ("name", "type", "arguments", "parameters")
_FIRST_KEY = re.compile(r'\{\s*(?:"(\w*)("?))?')


def read_head(text: str) -> tuple[str, int] | None:
    """Return the name of the call that a text begins with, and where its arguments begin; None if that is not clear."""
    head = _HEAD.match(text)
    name = None if head is None else _loaded(head[1])
    return (name, head.end()) if head is not None and isinstance(name, str) else None


def may_be_call(text: str) -> bool | None:
    """Return whether a text may be a call by how its object begins; None if there is too little of it to say.

    An object that begins with another key is an answer, and is not kept back to find that out.
    """
    if not text:
        return None
    first = _FIRST_KEY.match(text)
    if first is None:
        return False
    key, is_whole = first[1], bool(first[2])
    if is_whole:
        return key in _FIRST_KEYS
    if first.end() < len(text):
        return False
    return None if key is None or any(known.startswith(key) for known in _FIRST_KEYS) else False


class JsonCall:
    """What may turn out to be a call."""

    def __init__(self, syntax: CallSyntax, opening: str) -> None:
        """Begin behind its opening.

        Args:
            syntax: How it is written.
            opening: The mark and the white space in front of the object.
        """
        self.opening = opening
        self._object = JsonArguments(syntax.end, {})  # the whole call
        self._written = ""  # as JSON
        self._num_read = 0

    def take_whole(self, text: str) -> tuple[str, str] | None:
        """Return the object, and what comes behind; None if it has not ended.

        Args:
            text: All that came behind the opening; longer at every call.
        """
        stripped = text.lstrip()
        if stripped and stripped[0] != "{":
            return "", text
        written, num_chars = self._object.feed(text[self._num_read :])
        self._written, self._num_read = self._written + written, self._num_read + num_chars
        return (text[: self._num_read], text[self._num_read :]) if self._object.is_complete else None

    def parse(self) -> tuple[str, str] | None:
        """Return a whole call's name and arguments, however it is written; None if it is none."""
        call = _loaded(self._written)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        if not self.opening.strip() and not call.keys() & {"arguments", "parameters"}:
            return None  # without a mark, an object with a name is not yet a call
        given: Any = call.get("arguments", call.get("parameters"))
        arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        return call["name"], "{}" if arguments_object(arguments) == {} else arguments


def _loaded(text: str) -> Any:
    """Return a JSON value; None for what is none, or is nested too deeply."""
    try:
        return from_json(text)
    except ValueError:
        return None


def after_brace(text: str) -> str | None:
    """Return what comes behind a call's last brace, of the text behind its arguments; None if it has not come."""
    closing = JsonScanner()
    closing.feed("{")
    num_chars = closing.feed(text)
    return text[num_chars:] if closing.is_complete else None


@dataclass(slots=True)
class CallDelta:
    """What is new of one call."""

    index: int
    id: str | None = None  # with the first one
    name: str | None = None  # likewise
    arguments: str = ""
    is_whole: bool = False  # whether its arguments end with these, and are a JSON object

    def plain(self) -> dict[str, Any]:
        """Return it in OpenAI's shape."""
        if self.name is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


@dataclass(slots=True)
class MessageDelta:
    """What is new of a message."""

    pieces: list[tuple[Literal["reasoning", "content"], str] | CallDelta] = field(default_factory=list)
    """In the order in which the model wrote them: texts with their kind, and calls. No two texts of a kind follow."""

    def __bool__(self) -> bool:
        return bool(self.pieces)

    def add_text(self, kind: Literal["reasoning", "content"], text: str) -> None:
        """Add what is new of a text."""
        last = self.pieces[-1] if self.pieces else None
        if isinstance(last, tuple) and last[0] == kind:
            self.pieces[-1] = kind, last[1] + text
        elif text:
            self.pieces.append((kind, text))

    @property
    def reasoning(self) -> str:
        """All that is new of thoughts."""
        return "".join(piece[1] for piece in self.pieces if isinstance(piece, tuple) and piece[0] == "reasoning")

    @property
    def content(self) -> str:
        """All that is new of the content."""
        return "".join(piece[1] for piece in self.pieces if isinstance(piece, tuple) and piece[0] == "content")

    @property
    def calls(self) -> list[CallDelta]:
        """What is new of calls."""
        return [piece for piece in self.pieces if isinstance(piece, CallDelta)]

    def plain(self, *, as_function_call: bool = False) -> dict[str, Any]:
        """Return it in OpenAI's shape, without what is empty.

        Args:
            as_function_call: Name the first call in the older form; it has no room for others.
        """
        fields: dict[str, Any] = {}
        if self.reasoning:
            fields["reasoning_content"] = fields["reasoning"] = self.reasoning  # the older and the newer name
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
    OPEN = auto()  # where a call may begin without a mark
    CONTENT = auto()
    CALL_HEAD = auto()
    ARGUMENTS = auto()
    CALL_END = auto()


_RANDOM = random.SystemRandom()
_NUM_ID_CHARS = 9
"""The chat templates of Mistral's models refuse a call whose id has more or fewer, or other than letters and digits."""
_NO_CALLS = CallSyntax(begins=())
_NO_SCHEMAS: Mapping[str, Mapping[str, Any]] = MappingProxyType({})


class MessageParser:
    """Reads one message. White space around thoughts and calls belongs to neither."""

    def __init__(
        self,
        *,
        thoughts: ThoughtSyntax | None,
        calls: CallSyntax | None,
        begun: str = "",
        is_continued: bool = False,
        must_call: bool = False,
        as_function_call: bool = False,
        schemas: Mapping[str, Mapping[str, Any]] = _NO_SCHEMAS,
    ) -> None:
        """Begin before the first character.

        Args:
            thoughts: How the model writes them; None: what looks like one is content.
            calls: How the calls that are looked for are written; None: what looks like one is content.
            begun: What the prompt has begun of the syntax; see `thoughts.begun_in`.
            is_continued: Whether the prompt has begun the message: its white space counts, and no thought comes first.
            must_call: Whether the text is held to calls: what is none is the beginning of one that was cut off.
            as_function_call: Whether calls have the older form; see `MessageDelta.plain`.
            schemas: Of the functions' arguments, by name.
        """
        self.as_function_call = as_function_call
        self._calls = calls = calls or _NO_CALLS
        self._must_call = must_call
        self._schemas = schemas
        begins, anywhere = thoughts.begins if thoughts else (), thoughts is not None and thoughts.is_anywhere
        self._thought_begins = MarkFinder(begins)
        self._thought_ends = MarkFinder(marks(*thoughts.ends) if thoughts else ())
        dropped = (*calls.dropped, *(thoughts.dropped if thoughts else ()))
        self._call_begins = frozenset(calls.begins)
        self._in_content = MarkFinder((*calls.begins, *(begins if anywhere else ()), *dropped))
        self._begins = frozenset(begins)
        behind_call = (*self._in_content.marks, *(marks(calls.end) if calls.end else ()))
        self._behind_call = MarkFinder(behind_call)
        self._begun = begun
        self._rest = begun
        self._place = _Place.CONTENT if is_continued else self._behind_thoughts
        if thoughts is not None and not anywhere and (begun or not is_continued):
            self._place = _Place.START
        self._is_after_mark = bool(begun) and not is_continued  # white space is still to be dropped
        self._is_continued = is_continued
        self._opening = ""  # of the call that is being read: its mark, or the white space in front of its brace
        self._name: str | None = None  # its name, where the mark has one
        self._json: JsonCall | None = None  # what it is else, as far as its name is not known
        self._arguments: ArgumentsReader | None = None
        self._argument_pieces: list[str] = []  # of the call that is being read
        self._num_chars = 0
        self._num_whole_calls = 0
        self.num_calls = 0
        self.content_spans: list[tuple[int, int]] = []
        """Start and end of each run of content in the text, as far as it has become clear; the last one may grow."""

    @property
    def has_whole_calls(self) -> bool:
        """Whether there are calls, all of them with a JSON object as arguments: none was cut off."""
        return 0 < self.num_calls == self._num_whole_calls

    @property
    def num_settled(self) -> int:
        """How many characters of the text are certain to be content, or certain to be none."""
        if self._place in (_Place.THOUGHT, _Place.ARGUMENTS):
            return self._num_chars
        opening = len(self._opening) if self._place is _Place.CALL_HEAD else 0
        return max(0, self._rest_start - opening)  # the rest may have what the prompt has begun

    @property
    def _rest_start(self) -> int:
        return self._num_chars - len(self._rest)

    def feed(self, text: str, *, is_last: bool = False) -> MessageDelta:
        """Read on; return what has become clear. With the last text, everything does."""
        self._rest += text
        self._num_chars += len(text)
        delta = MessageDelta()
        while self._go_on(delta, is_last):
            pass
        if self._must_call:
            delta.pieces = [piece for piece in delta.pieces if isinstance(piece, CallDelta) or piece[0] != "content"]
            self.content_spans.clear()
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
            case _Place.CALL_HEAD:
                return self._read_head(delta, is_last) if self._name is None else self._read_behind_name(delta, is_last)
            case _Place.ARGUMENTS:
                return self._read_arguments(delta)
            case _:
                return self._end_call(is_last)

    def _start(self, is_last: bool) -> bool:
        text = self._rest.lstrip()
        certain, found = self._thought_begins.find(text, is_last=is_last)
        if found is not None and found.start == 0:
            is_space_kept = self._is_continued and self._begun
            self._enter(_Place.THOUGHT, text[found.end :], after_mark=not is_space_kept)
            return True
        if found is None and certain == 0 and not is_last:
            return False
        self._place = self._behind_thoughts
        return True

    def _think(self, delta: MessageDelta, is_last: bool) -> bool:
        before, found = self._taken(self._thought_ends, is_last)
        delta.add_text("reasoning", before.rstrip() if is_last and found is None else before)
        if found is not None:
            self._enter(self._behind_thoughts, self._rest)
        return found is not None

    @property
    def _behind_thoughts(self) -> _Place:
        return _Place.OPEN if self._calls.may_be_bare else _Place.CONTENT

    def _open(self, is_last: bool) -> bool:
        """Find out whether the brace of a call comes next."""
        skipped = f" \t\r\n{self._calls.between}" if self.num_calls else None
        text = self._rest.lstrip(skipped)
        if (is_call := may_be_call(text)) is None and not is_last:
            return False
        if is_call:
            self._begin_json(self._rest[: len(self._rest) - len(text)], text)
        else:
            self._place = _Place.CONTENT
            if self.num_calls:
                self._rest = text
        return True

    def _read_content(self, delta: MessageDelta, is_last: bool) -> bool:
        if not self._in_content:
            self._add_content(delta, self._without_leading_space(self._rest), self._num_chars)
            self._rest = ""
            return False
        if self._begun and not self._rest.startswith(self._begun):
            self._begun = ""
        text, start = self._rest, self._rest_start
        before, found = self._taken(self._in_content, is_last)
        if self._begun and before.startswith(self._begun):  # it is the prompt's, and no mark came of it
            before = before[len(self._begun) :]
            self._begun = ""
        end = self._rest_start if found is None else start + len(text[: found.start].rstrip())
        self._add_content(delta, before, end)
        if found is None:
            return False
        self._begun = ""
        if found.mark in self._call_begins:
            mark = text[max(found.start, -start) : found.end]  # without what of it is the prompt's
            if found.name is None:
                self._begin_json(mark, self._rest)
            else:
                self._opening, self._name = mark, found.name
                self._enter(_Place.CALL_HEAD, self._rest)
        else:
            self._enter(_Place.THOUGHT if found.mark in self._begins else _Place.CONTENT, self._rest)
        return True

    def _begin_json(self, opening: str, rest: str) -> None:
        self._opening, self._name, self._json = opening, None, JsonCall(self._calls, opening)
        self._enter(_Place.CALL_HEAD, rest)

    def _read_head(self, delta: MessageDelta, is_last: bool) -> bool:
        """Read the beginning of a call that is a JSON object."""
        assert self._json is not None
        if (head := read_head(self._rest)) is not None:
            name, num_chars = head
            self._begin_arguments(delta, name)
            self._enter(_Place.ARGUMENTS, self._rest[num_chars:], after_mark=False)
            return True
        whole = self._json.take_whole(self._rest)
        if whole is None and not is_last:
            return False
        inside, after = (self._rest, "") if whole is None else whole
        call = None if whole is None else self._json.parse()
        if call is None:  # nothing that could be called: it stays text
            content = self._without_leading_space(self._opening + inside)
            self._add_content(delta, content, self._num_chars - len(after))
            self._enter(_Place.CONTENT, after, after_mark=False)
        else:
            name, arguments = call
            self._begin_arguments(delta, name)
            self._add_arguments(delta, arguments, is_complete=True)
            self._enter(_Place.CALL_END if self._calls.end else self._behind_calls, after)
        return whole is not None

    def _read_behind_name(self, delta: MessageDelta, is_last: bool) -> bool:
        """Read on behind a mark that has the function's name."""
        assert self._name is not None
        may_begin = self._new_arguments(self._name).may_begin(self._rest)
        if may_begin is None and not is_last:
            return False
        if may_begin is not False:
            self._begin_arguments(delta, self._name)
            self._enter(_Place.ARGUMENTS, self._rest, after_mark=False)
        else:
            self._add_content(delta, self._without_leading_space(self._opening), self._rest_start)
            self._enter(_Place.CONTENT, self._rest, after_mark=False)
        return True

    def _begin_arguments(self, delta: MessageDelta, name: str) -> None:
        call_id = "".join(_RANDOM.choices(ascii_letters + digits, k=_NUM_ID_CHARS))
        delta.pieces.append(CallDelta(self.num_calls, call_id, name))
        self.num_calls += 1
        self._arguments, self._argument_pieces = self._new_arguments(name), []

    def _new_arguments(self, name: str) -> ArgumentsReader:
        return self._calls.arguments(self._calls.end, self._schemas.get(name, {}))

    def _read_arguments(self, delta: MessageDelta) -> bool:
        assert self._arguments is not None
        arguments, num_chars = self._arguments.feed(self._rest)
        self._rest = self._rest[num_chars:]
        self._add_arguments(delta, arguments, is_complete=self._arguments.is_complete)
        if self._arguments.is_complete:
            self._place = _Place.CALL_END
        return self._arguments.is_complete

    def _add_arguments(self, delta: MessageDelta, arguments: str, *, is_complete: bool) -> None:
        if not (arguments or is_complete):
            return
        call = next((piece for piece in reversed(delta.pieces) if isinstance(piece, CallDelta)), None)
        if call is None or call.index != self.num_calls - 1:
            call = CallDelta(self.num_calls - 1)
            delta.pieces.append(call)
        call.arguments += arguments
        self._argument_pieces.append(arguments)
        if is_complete:
            call.is_whole = arguments_object("".join(self._argument_pieces)) is not None
            self._num_whole_calls += call.is_whole

    def _add_content(self, delta: MessageDelta, content: str, end: int) -> None:
        """Add content that ends so many characters behind the text's beginning."""
        if not content:
            return
        delta.add_text("content", content)
        start = end - len(content)
        if self.content_spans and self.content_spans[-1][1] == start:
            start = self.content_spans.pop()[0]
        self.content_spans.append((start, end))

    @property
    def _behind_calls(self) -> _Place:
        return _Place.CONTENT if self._calls.end else _Place.OPEN

    def _end_call(self, is_last: bool) -> bool:
        """Read what comes behind the arguments, up to the call's end; what should not be there is dropped."""
        if not self._calls.end:
            after = after_brace(self._rest) if self._name is None else self._rest
            if after is not None:
                self._enter(self._behind_calls, after)
            return after is not None
        _, found = self._behind_call.find(self._rest, is_last=is_last)
        if found is None:
            return False
        is_end = found.mark.opening == self._calls.end
        self._enter(self._behind_calls, self._rest[found.end if is_end else found.start :])
        return True

    def _enter(self, place: _Place, rest: str, *, after_mark: bool = True) -> None:
        self._place, self._rest, self._is_after_mark = place, rest, after_mark

    def _taken(self, finder: MarkFinder, is_last: bool) -> tuple[str, Found | None]:
        """Take the text up to a mark, and the mark, or what cannot belong to one any more.

        White space before a mark belongs to nothing.
        """
        end, found = finder.find(self._rest, is_last=is_last)
        before, self._rest = self._rest[:end], self._rest[end if found is None else found.end :]
        if found is not None:
            before = before.rstrip()
        elif not is_last:
            kept = before[len(before.rstrip()) :]
            before, self._rest = before.rstrip(), kept + self._rest
        return self._without_leading_space(before), found

    def _without_leading_space(self, text: str) -> str:
        if self._is_after_mark:
            text = text.lstrip()
            self._is_after_mark = not text
        return text

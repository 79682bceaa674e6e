"""The arguments of a tool call: from how a model writes them to a JSON object, as the text comes."""

from __future__ import annotations

import json
import re
from ast import literal_eval
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from pydantic_core import from_json

from raypp.openai_api.tools import ALL_TYPES, has_type, parameter_types


class JsonScanner:
    """Counts braces outside of strings."""

    def __init__(self) -> None:
        self.is_begun = False
        self.is_complete = False
        self.control_chars: list[int] = []
        """Where in the text that was read last there are control characters inside of strings: JSON has none there."""
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False

    def feed(self, text: str, start: int = 0, *, stop: str = "") -> int:
        """Read on; return where in the text the object ends, which begins with the first character ever.

        Args:
            text: What comes next.
            start: Where in it.
            stop: A character before which to leave off, outside of strings; empty: none is.
        """
        self.control_chars.clear()
        for index in range(start, len(text)):
            char = text[index]
            if self.is_complete:
                return index
            if self._is_in_string:
                if char < " ":
                    self.control_chars.append(index)
                self._read_in_string(char)
            elif char == '"':
                self._is_in_string = True
            elif char in "{[":
                self._depth += 1
                self.is_begun = True
            elif char in "}]":
                self._depth -= 1
                self.is_complete = self._depth == 0
            elif char == stop:
                return index
        return len(text)

    def _read_in_string(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._is_in_string = False


class ArgumentsReader(Protocol):
    """Reads the arguments of one call."""

    style: ClassVar[str | None]
    """How a form writes them: `style` of a `json_schema` in structural tags. None: no form is known."""

    def __init__(self, end: str, schema: Mapping[str, Any]) -> None:
        """Begin before the first character.

        Args:
            end: What ends the call; arguments that are no JSON end there too. Empty: nothing does.
            schema: Of the arguments, as the request has it; empty if it has none.
        """

    @property
    def is_complete(self) -> bool:
        """Whether all of them were read."""

    def may_begin(self, text: str) -> bool | None:
        """Return whether a text begins with arguments; None if there is too little of it to say."""

    def feed(self, text: str) -> tuple[str, int]:
        """Return what of the JSON object has become clear, and how many characters of the text were read for it.

        Args:
            text: What comes next: what was not read the last time, and what is new.
        """


class JsonArguments:
    """Arguments that are a JSON object: they are passed on as they are, with control characters in strings escaped.

    Where there should be one, null, an empty list and nothing at all are the empty object.
    """

    style: ClassVar[str | None] = "json"
    _NOTHING = ("null", "[]")

    def __init__(self, end: str, schema: Mapping[str, Any]) -> None:
        self._end = end
        self._nothing = (*self._NOTHING, end) if end else self._NOTHING
        self._scanner = JsonScanner()
        self.is_complete = False

    def may_begin(self, text: str) -> bool | None:
        """Return whether a brace comes first, or what stands for an empty object."""
        text = text.lstrip()
        if text.startswith(("{", *self._nothing)):
            return True
        return None if any(nothing.startswith(text) for nothing in self._nothing) else False

    def feed(self, text: str) -> tuple[str, int]:
        """Return the text up to the last brace; if that lacks, up to the call's end, outside of strings."""
        start = len(text) - len(text.lstrip()) if not self._scanner.is_begun else 0
        if not self._scanner.is_begun and not text.startswith("{", start):
            self.is_complete = text.startswith(self._nothing, start)
            word = next((word for word in self._NOTHING if text.startswith(word, start)), "")
            return ("{}", start + len(word)) if self.is_complete else ("", 0)
        at, control_chars = start, list[int]()
        while not self.is_complete and at < len(text):
            at = self._scanner.feed(text, at, stop=self._end[:1])
            control_chars += self._scanner.control_chars
            self.is_complete = self._scanner.is_complete
            rest = text[at : at + len(self._end)]
            if self.is_complete or not rest:
                break
            if rest == self._end:
                self.is_complete = True
            elif self._end.startswith(rest):
                break  # it may become the end
            else:
                at += 1
        pieces = list[str]()
        for place in control_chars:
            pieces += text[start:place], _escaped(text[place])
            start = place + 1
        return "".join((*pieces, text[start:at])), at


class XmlParameters:
    """Arguments as Qwen3-Coder writes them: `<parameter=NAME>`, a line break, the value, another one, `</parameter>`.

    A value ends where the next one begins behind its mark, or the call ends: other marks are part of it. The schema
    says which types it may have, see `parameter_types`. What is not certain to be a text is JSON, or what Python writes
    in its place (`None`), where that has one of the types; else it is a text. Certain texts are passed on as they come.
    """

    style: ClassVar[str | None] = "qwen_xml"
    _BEGIN = re.compile(r"\s*<parameter=([^>]*)>")
    _END = "</parameter>"

    def __init__(self, end: str, schema: Mapping[str, Any]) -> None:
        self._end = end
        self._behind_value = ("<parameter=", end)  # what follows a value's end
        properties = schema.get("properties")
        of_names = properties if isinstance(properties, Mapping) else {}
        self._types = {name: parameter_types(of_name, schema) for name, of_name in of_names.items()}
        self._num_values = 0
        self._name: str | None = None  # of the value that is being read
        self._is_open = False  # whether its text has begun
        self.is_complete = False

    def may_begin(self, text: str) -> bool | None:
        """Return True: whatever comes is a list of parameters, maybe an empty one."""
        return True

    def feed(self, text: str) -> tuple[str, int]:
        """Return the JSON of what has been read."""
        out, at = "", 0
        while not self.is_complete:
            if self._name is None:
                begin, end = self._BEGIN.match(text, at), text.find(self._end, at)
                if begin is not None:
                    out += ("{" if not self._num_values else ", ") + json.dumps(begin[1].strip()) + ": "
                    self._name, at = begin[1].strip(), begin.end()
                    self._num_values += 1
                elif end >= 0:
                    nested = text.find("<parameter=", at, end)
                    if nested > at:  # behind something that is no parameter
                        at = nested
                        continue
                    out, at = out + ("}" if self._num_values else "{}"), end
                    self.is_complete = True
                else:
                    break
            else:
                value, num_read, is_whole = self._value(text[at:])
                out, at = out + value, at + num_read
                if not is_whole:
                    break
                self._name = None
        return out, at

    def _value(self, text: str) -> tuple[str, int, bool]:
        """Return the JSON of a value as far as it is certain, the characters read for it, and whether it is whole."""
        end, is_whole = self._end_of(text)
        types = self._types.get(self._name or "", ALL_TYPES)
        if types != {"string"}:
            return (_json_of(text[:end], types), end + len(self._END), True) if is_whole else ("", 0, False)
        start, opening = 0 if self._is_open else int(text.startswith("\n")), "" if self._is_open else '"'
        if is_whole:
            self._is_open = False
            return opening + _escaped(text[start:end].removesuffix("\n")) + '"', end + len(self._END), True
        end -= text.endswith("\n", start, end)  # it may be the value's end
        if end <= start:
            return "", 0, False
        self._is_open = True
        return opening + _escaped(text[start:end]), end, False

    def _end_of(self, text: str) -> tuple[int, bool]:
        """Return how many characters are certain to be the value's, and whether it ends behind them."""
        at = 0
        while (end := text.find(self._END, at)) >= 0:
            at = end + len(self._END)
            behind = text[at:].lstrip()
            if behind.startswith(self._behind_value):
                return end, True
            if any(mark.startswith(behind) for mark in self._behind_value):
                return end, False
        for tail in range(min(len(self._END), len(text)), 0, -1):
            if self._END.startswith(text[-tail:]):
                return len(text) - tail, False
        return len(text), False


def _json_of(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a value that has one of these types, as far as its text can be read as one of them."""
    for read in (from_json, literal_eval):
        try:
            value = read(text.strip())
            written = json.dumps(value, ensure_ascii=False, allow_nan=False)
            written.encode()
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
        is_json = read is from_json and not (isinstance(value, str) and types <= {"string", "null"})
        is_clear = is_json or value is None or isinstance(value, bool)  # no text that looks like it
        if "string" not in types or (is_clear and has_type(value, types)):
            return written
    bare = text.removeprefix("\n").removesuffix("\n") if "string" in types else text.strip()
    return json.dumps(bare, ensure_ascii=False)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]

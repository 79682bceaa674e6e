"""The arguments of a tool call: from how a model writes them to a JSON object, as the text comes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from raypp.openai_api.json_scanner import JsonScanner
from raypp.openai_api.parameter_kinds import ParameterKind, parameter_kind


class ArgumentsReader(Protocol):
    """Reads the arguments of one call."""

    style: ClassVar[str | None]
    """How a form writes them: `style` of a `json_schema` in xgrammar's structural tags. None: no form is known."""

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
    """Arguments that are a JSON object: they are passed on as they are."""

    style: ClassVar[str | None] = "json"

    def __init__(self, end: str, schema: Mapping[str, Any]) -> None:
        self._end = end
        self._scanner = JsonScanner()
        self.is_complete = False

    def may_begin(self, text: str) -> bool | None:
        """Return whether a brace comes first."""
        text = text.lstrip()
        return text[0] == "{" if text else None

    def feed(self, text: str) -> tuple[str, int]:
        """Return the text up to the last brace; if that lacks, up to the call's end, outside of strings."""
        start = len(text) - len(text.lstrip()) if not self._scanner.is_begun else 0
        at = start
        while not self.is_complete and at < len(text):
            at = self._scanner.feed(text, at, stop=self._end[:1])
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
        return text[start:at], at


class XmlParameters:
    """Arguments as Qwen3-Coder writes them: `<parameter=NAME>`, a line break, the value, another one, `</parameter>`.

    The schema says which values are texts, see `parameter_kind`; others are JSON, or texts if they are none. What is
    certain to be a text is passed on as it comes.
    """

    style: ClassVar[str | None] = "qwen_xml"
    _BEGIN = re.compile(r"\s*<parameter=([^>]*)>")
    _END = "</parameter>"

    def __init__(self, end: str, schema: Mapping[str, Any]) -> None:
        self._end = end
        properties = schema.get("properties")
        of_names = properties if isinstance(properties, Mapping) else {}
        self._kinds = {name: parameter_kind(of_name, schema) for name, of_name in of_names.items()}
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
        end = text.find(self._END)
        kind = self._kinds.get(self._name or "")
        if kind is ParameterKind.TEXT_OR_NULL:
            if end >= 0 and text[:end].strip() == "null":
                return "null", end + len(self._END), True
            if end < 0 and not self._is_open:
                return "", 0, False
        elif kind is not ParameterKind.TEXT:
            if end < 0:
                return "", 0, False
            return _json_of(text[:end]), end + len(self._END), True
        start, opening = 0, ""
        if not self._is_open:
            if text == "":
                return "", 0, False
            start, opening, self._is_open = int(text[0] == "\n"), '"', True
        if end >= 0:
            self._is_open = False
            return opening + _escaped(text[start:end].removesuffix("\n")) + '"', end + len(self._END), True
        certain = len(text)
        for tail in range(min(len(self._END), len(text)), 0, -1):
            if f"\n{self._END}".startswith(text[-tail:]) or self._END.startswith(text[-tail:]):
                certain = len(text) - tail
                break
        certain = max(certain, start)
        return opening + _escaped(text[start:certain]), certain, False


def _json_of(text: str) -> str:
    text = text.strip()
    try:
        return json.dumps(json.loads(text), ensure_ascii=False)
    except ValueError:
        return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]

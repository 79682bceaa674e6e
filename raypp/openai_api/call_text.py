"""A tool call that is one JSON object, with the function's name in it: where it ends, and what it says."""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic_core import from_json

from raypp.api.conversation import arguments_object
from raypp.openai_api.call_arguments import JsonArguments
from raypp.openai_api.json_scanner import JsonScanner
from raypp.openai_api.syntax import CallSyntax

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
        self._syntax = syntax
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

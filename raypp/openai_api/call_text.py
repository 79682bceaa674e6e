"""A tool call that is one JSON object, with the function's name in it: where it ends, and what it says."""

from __future__ import annotations

import json
import re
from typing import Any

from raypp.openai_api.json_scanner import JsonScanner
from raypp.openai_api.syntax import CallSyntax

HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?'
    r'"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
"""What nearly every call begins with, up to the brace of its arguments: from there on they are streamed."""

_FIRST_KEYS = ("name", "type", "arguments", "parameters")
_FIRST_KEY = re.compile(r'\{\s*(?:"(\w*)("?))?')


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
        self._object = JsonScanner()  # the whole call
        self._num_scanned = 0

    def take_whole(self, text: str) -> tuple[str, str] | None:
        """Return a call with its end, and what comes behind; None if it has not ended.

        Args:
            text: All that came behind the opening; longer at every call.
        """
        if self._syntax.end:
            inside, mark, after = text.partition(self._syntax.end)
            return (inside + mark, after) if mark else None
        start = len(text) - len(text.lstrip())
        if start == len(text):
            return None
        if text[start] != "{":
            return "", text
        num_chars = self._object.feed(text[self._num_scanned :])
        end, self._num_scanned = self._num_scanned + num_chars, len(text)
        return (text[:end], text[end:]) if self._object.is_complete else None

    def parse(self, whole: str) -> tuple[str, str] | None:
        """Return a whole call's name and arguments, however it is written; None if it is none."""
        try:
            call = json.loads(whole.removesuffix(self._syntax.end), strict=False)
        except ValueError:
            return None
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        if not self.opening.strip() and not call.keys() & {"arguments", "parameters"}:
            return None  # without a mark, an object with a name is not yet a call
        arguments: Any = call.get("arguments", call.get("parameters", {}))
        return call["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def after_brace(text: str) -> str | None:
    """Return what comes behind a call's last brace, of the text behind its arguments; None if it has not come."""
    closing = JsonScanner()
    closing.feed("{")
    num_chars = closing.feed(text)
    return text[num_chars:] if closing.is_complete else None

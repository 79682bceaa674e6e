"""The text of one tool call: where it begins, where it ends, and what it says."""

from __future__ import annotations

import json
import re
from typing import Any

from raypp.openai_api.conventions import CallSyntax
from raypp.openai_api.json_scanner import JsonScanner

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


class OpenedCall:
    """What may turn out to be a call."""

    def __init__(self, syntax: CallSyntax, opening: str) -> None:
        """Begin behind its opening.

        Args:
            syntax: How it is written.
            opening: The tag and the white space in front of the object.
        """
        self._syntax = syntax
        self.opening = opening
        self.arguments = JsonScanner()
        self._object = JsonScanner()  # the whole call
        self._num_scanned = 0

    def take_whole(self, text: str) -> tuple[str, str] | None:
        """Return a call with its end, and what comes behind; None if it has not ended.

        Args:
            text: All that came behind the opening; longer at every call.
        """
        if self._syntax.end_tag:
            inside, tag, after = text.partition(self._syntax.end_tag)
            return (inside + tag, after) if tag else None
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
            call = json.loads(whole.removesuffix(self._syntax.end_tag), strict=False)
        except ValueError:
            return None
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        if not self.opening.strip() and not call.keys() & {"arguments", "parameters"}:
            return None  # without a tag, an object with a name is not yet a call
        arguments: Any = call.get("arguments", call.get("parameters", {}))
        return call["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)

    def after_end(self, text: str) -> str | None:
        """Return what comes behind the call, of the text behind its arguments; None if it has not ended."""
        if self._syntax.end_tag:
            _, tag, after = text.partition(self._syntax.end_tag)
            return after if tag else None
        closing = JsonScanner()
        closing.feed("{")
        num_chars = closing.feed(text)
        return text[num_chars:] if closing.is_complete else None

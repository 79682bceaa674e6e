"""The form that a chat's answer must have, as a constraint: JSON, tool calls, and thoughts in front of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from raypp.errors import RequestError, page
from raypp.openai_api.syntax import PLAIN_SYNTAX, CallSyntax, MessageSyntax
from raypp.openai_api.tools import Tool, ToolUse

_ANY_OBJECT = {"type": "object", "additionalProperties": True}
_ANY_TEXT = {"type": "any_text"}

Form = dict[str, Any]
"""A part of a structural tag."""


@dataclass(frozen=True)
class AnswerForm:
    """What is asked of one answer."""

    schema: dict[str, Any] | None = None  # of response_format; any object for json_object
    tool_use: ToolUse | None = None
    syntax: MessageSyntax = PLAIN_SYNTAX  # how the model writes calls, where tools are, and thoughts
    may_think: bool = False  # whether thoughts may come before
    is_thinking: bool = False  # whether the prompt leaves off inside of one

    def constraint(self) -> dict[str, Any] | None:
        """Return it as `SamplingParams.structured_outputs`; None when the text is free.

        Raises:
            RequestError: a strict function whose parameters cannot be enforced, or calls that no form is known of.
        """
        use = self.tool_use
        tools = use if use is not None and use.holds_arguments else None
        answer = None if self.schema is None else {"type": "json_schema", "json_schema": self.schema}
        if tools is not None and tools.must_call:
            return self._after_thoughts(self._calls(tools))
        if use is not None and answer is not None:
            return self._after_thoughts(_one_of([self._answer(answer), self._calls(use)]))
        if tools is not None and self._is_framed:
            return self._after_thoughts(_one_of([self._answer(_ANY_TEXT), self._calls(tools)]))
        if tools is not None:
            return self._triggered(tools)
        if answer is None:
            return None
        if self.may_think or self.is_thinking or self._is_framed:
            return self._after_thoughts(self._answer(answer))
        return {"json_schema": self.schema}

    @property
    def _is_framed(self) -> bool:
        """Whether every answer has a mark in front, so that its kind is decided before its first character."""
        return self.syntax.thoughts is not None and self.syntax.thoughts.answer != "$answer"

    @property
    def _call_syntax(self) -> CallSyntax:
        assert self.syntax.calls is not None, "tools for a model that cannot call any"
        if not self.syntax.calls.call or self.syntax.calls.arguments.style is None:
            raise RequestError(
                "tool calls of this model cannot be constrained",
                got="a forced call, a strict function, or tools beside response_format",
                expected='tool_choice="auto" and functions that are not strict',
                hint=f"raypp only reads the syntax of its calls; {page('tool_calls')} lists those that it can enforce",
                param="tools",
            )
        return self.syntax.calls

    def _answer(self, answer: Form) -> Form:
        if self.syntax.thoughts is None:
            return answer
        before, _, behind = self.syntax.thoughts.answer.partition("$answer")
        return _sequence([*self._text(before), answer, *self._text(behind)])

    def _after_thoughts(self, answer: Form) -> dict[str, Any]:
        thoughts = self.syntax.thoughts
        if thoughts is None or not (self.is_thinking or self.may_think):
            return _structural_tag(answer)
        before, _, behind = thoughts.thought.partition("$thought")
        end = next(end for end in thoughts.ends if behind.startswith(end))
        [mark] = self._text(end)
        free = {"type": "tag", "begin": "", "content": _ANY_TEXT, "end": _end(mark)}
        thought = [free, *self._text(behind.removeprefix(end))]
        if self.is_thinking:
            return _structural_tag(_sequence([_sequence(thought), answer]))
        nothing = {"type": "const_string", "value": ""}
        return _structural_tag(_sequence([_one_of([_sequence([*self._text(before), *thought]), nothing]), answer]))

    def _calls(self, use: ToolUse) -> Form:
        """Return one or several calls and nothing else."""
        syntax = self._call_syntax
        before, _, behind = syntax.calls.partition("$calls")
        return _sequence([*self._text(before), *self._in_a_row(use), *self._text(behind)])

    def _in_a_row(self, use: ToolUse) -> list[Form]:
        syntax = self._call_syntax
        call = _one_of([_sequence(self._call(use, tool)) for tool in use.tools])
        if syntax.separator is None or not use.may_call_several:
            return [call]
        more = {"type": "star", "content": _sequence([*self._text(syntax.separator), call])}
        return [call, more]

    def _call(self, use: ToolUse, tool: Tool, written: str = "") -> list[Form]:
        """Return one call, without what is written of it already."""
        before, _, behind = self._call_syntax.call.replace("$name", tool.function.name).partition("$arguments")
        style = self._call_syntax.arguments.style
        arguments: Form = {"type": "json_schema", "json_schema": use.argument_schema(tool, is_json=style == "json")}
        if style != "json":
            # More white space at a time nobody needs, and a model might write nothing else for ever.
            arguments |= {"style": style, "max_whitespace_cnt": 1}
        return [*self._text(before.removeprefix(written)), arguments, *self._text(behind)]

    def _triggered(self, use: ToolUse) -> dict[str, Any]:
        """Return free text, thoughts among it; what begins as calls do is held to their form."""
        syntax = self._call_syntax
        before, _, behind = syntax.calls.partition("$calls")
        if before:
            form = [*self._text(before.removeprefix(syntax.trigger)), *self._in_a_row(use)]
        else:
            form = [_one_of([_sequence(self._call(use, tool, syntax.trigger)) for tool in use.tools])]
        end = self._text(behind)
        is_last = bool(before) or syntax.separator is None or not use.may_call_several
        [trigger] = self._text(syntax.trigger)
        if trigger["type"] == "token":
            calls = [trigger, *form, *end]
            more = {
                "type": "optional" if is_last else "star",
                "content": _sequence(calls + [_ANY_TEXT] * (not is_last)),
            }
            free = _sequence([_ANY_TEXT, more])
        else:
            last = _end(end.pop()) if end else ""
            tag = {"type": "tag", "begin": syntax.trigger, "content": _sequence([*form, *end]), "end": last}
            free = {"type": "triggered_tags", "triggers": [syntax.trigger], "tags": [tag], "stop_after_first": is_last}
        thoughts = self.syntax.thoughts
        # Free text has thoughts in it, unless it cannot write their marks.
        has_own_thoughts = thoughts is None or not self.syntax.special_tokens.keys() & set(thoughts.ends)
        return _structural_tag(free) if has_own_thoughts else self._after_thoughts(free)

    def _text(self, text: str) -> list[Form]:
        """Return a text, with special tokens as themselves: nothing else writes them."""
        tokens = self.syntax.special_tokens
        pieces = re.split(f"({'|'.join(map(re.escape, tokens))})", text) if tokens else [text]
        return [
            {"type": "token", "token": tokens[piece]} if piece in tokens else {"type": "const_string", "value": piece}
            for piece in pieces
            if piece
        ]


def response_schema(kind: str, json_schema: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the schema that `response_format` asks for; None when it asks for text."""
    if kind == "json_object":
        return _ANY_OBJECT
    if json_schema is None:
        return None
    schema = json_schema.get("schema")
    return _ANY_OBJECT if schema is None else schema


def _structural_tag(form: Form) -> dict[str, Any]:
    return {"structural_tag": {"type": "structural_tag", "format": form}}


def _end(mark: Form) -> Any:
    """Return what ends a tag: a text, or a token."""
    return mark.get("value", mark)


def _sequence(elements: list[Form]) -> Form:
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": elements}


def _one_of(elements: list[Form]) -> Form:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}

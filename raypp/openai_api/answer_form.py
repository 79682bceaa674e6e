"""The form that a chat's answer must have, as a constraint: JSON, tool calls, and thoughts in front of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raypp.openai_api.conventions import END_THINK, THINK, CallSyntax
from raypp.openai_api.tools import Tool, ToolUse

_ANY_OBJECT = {"type": "object", "additionalProperties": True}
_THOUGHT = {"type": "tag", "begin": f"{THINK}\n", "content": {"type": "any_text"}, "end": f"{END_THINK}\n\n"}


@dataclass(frozen=True)
class AnswerForm:
    """What is asked of one answer."""

    schema: dict[str, Any] | None = None  # of response_format; any object for json_object
    tool_use: ToolUse | None = None
    calls: CallSyntax | None = None  # how the model writes them; there where tools are
    may_think: bool = False  # whether thoughts may come before
    is_thinking: bool = False  # whether the prompt leaves off inside of one

    def constraint(self) -> dict[str, Any] | None:
        """Return it as `SamplingParams.structured_outputs`; None when the text is free.

        Raises:
            RequestError: a strict function whose parameters cannot be enforced.
        """
        tools = self.tool_use if self.tool_use is not None and self.tool_use.holds_arguments else None
        answer = None if self.schema is None else {"type": "json_schema", "json_schema": self.schema}
        if tools is not None and tools.must_call:
            return self._after_thoughts(_calls(tools, self._syntax))
        if self.tool_use is not None and answer is not None:
            return self._after_thoughts({"type": "or", "elements": [answer, _calls(self.tool_use, self._syntax)]})
        if tools is not None:
            # Free text, thoughts among it; where a call begins, it is held to its form.
            tags = [_call(tools, tool, self._syntax) for tool in tools.tools]
            return _structural_tag(
                {
                    "type": "triggered_tags",
                    "triggers": [self._syntax.trigger],
                    "tags": tags,
                    "stop_after_first": _has_one_call(tools, self._syntax),
                }
            )
        if self.schema is None:
            return None
        return self._after_thoughts(answer) if self.may_think or self.is_thinking else {"json_schema": self.schema}

    @property
    def _syntax(self) -> CallSyntax:
        assert self.calls is not None, "tools for a model that cannot call any"
        return self.calls

    def _after_thoughts(self, answer: Any) -> dict[str, Any]:
        if self.is_thinking:
            return _structural_tag({"type": "sequence", "elements": [{**_THOUGHT, "begin": ""}, answer]})
        if self.may_think:
            thought = {"type": "or", "elements": [_THOUGHT, {"type": "const_string", "value": ""}]}
            return _structural_tag({"type": "sequence", "elements": [thought, answer]})
        return _structural_tag(answer)


def response_schema(kind: str, json_schema: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the schema that `response_format` asks for; None when it asks for text."""
    if kind == "json_object":
        return _ANY_OBJECT
    return None if json_schema is None else json_schema.get("schema", _ANY_OBJECT)


def _structural_tag(form: dict[str, Any]) -> dict[str, Any]:
    return {"structural_tag": {"type": "structural_tag", "format": form}}


def _calls(use: ToolUse, syntax: CallSyntax) -> dict[str, Any]:
    return {
        "type": "tags_with_separator",
        "tags": [_call(use, tool, syntax) for tool in use.tools],
        "separator": syntax.separator or "",
        "at_least_one": True,
        "stop_after_first": _has_one_call(use, syntax),
    }


def _call(use: ToolUse, tool: Tool, syntax: CallSyntax) -> dict[str, Any]:
    return {
        "type": "tag",
        "begin": syntax.begin(tool.function.name),
        "content": {"type": "json_schema", "json_schema": use.argument_schema(tool)},
        "end": syntax.end,
    }


def _has_one_call(use: ToolUse, syntax: CallSyntax) -> bool:
    return not use.may_call_several or syntax.separator is None

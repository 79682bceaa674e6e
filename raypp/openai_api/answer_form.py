"""The form that a chat's answer must have, as a constraint: JSON, tool calls, and thoughts in front of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raypp.openai_api.conventions import CALL, END_CALL, END_THINK, THINK
from raypp.openai_api.tools import Tool, ToolUse

_ANY_OBJECT = {"type": "object", "additionalProperties": True}
_THOUGHT = {"type": "tag", "begin": f"{THINK}\n", "content": {"type": "any_text"}, "end": f"{END_THINK}\n\n"}


@dataclass(frozen=True)
class AnswerForm:
    """What is asked of one answer."""

    schema: dict[str, Any] | None = None  # of response_format; any object for json_object
    tool_use: ToolUse | None = None
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
            return self._after_thoughts(_calls(tools))
        if self.tool_use is not None and answer is not None:
            return self._after_thoughts({"type": "or", "elements": [answer, _calls(self.tool_use)]})
        if tools is not None:
            # Free text, thoughts among it; where a call begins, it is held to its form.
            tags = [_call(tools, tool) for tool in tools.tools]
            return _structural_tag(
                {"type": "triggered_tags", "triggers": [CALL], "tags": tags, "stop_after_first": _only_one(tools)}
            )
        if self.schema is None:
            return None
        return self._after_thoughts(answer) if self.may_think or self.is_thinking else {"json_schema": self.schema}

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


def _calls(use: ToolUse) -> dict[str, Any]:
    return {
        "type": "tags_with_separator",
        "tags": [_call(use, tool) for tool in use.tools],
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": _only_one(use),
    }


def _call(use: ToolUse, tool: Tool) -> dict[str, Any]:
    return {
        "type": "tag",
        "begin": f'{CALL}\n{{"name": "{tool.function.name}", "arguments": ',
        "content": {"type": "json_schema", "json_schema": use.argument_schema(tool)},
        "end": f"}}\n{END_CALL}",
    }


def _only_one(use: ToolUse) -> bool:
    return not use.may_call_several

"""Conversations as chat templates read them, and how they become text: the same for Python and HTTP.

What clients send differs from what templates expect: `developer` for `system`, `null` for no content, the arguments of
a replayed call as JSON text, texts in parts. A template would refuse these, or write them into the prompt as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from pydantic_core import from_json

from raypp.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class Rendering:
    """What the chat template gets beside the messages.

    Raises RequestError on values that contradict each other.
    """

    tools: Sequence[Mapping[str, Any]] | None = None
    """Functions that the model may call, in OpenAI's shape."""
    chat_template: str | None = None
    """A template in Jinja, in place of the model's own."""
    chat_template_kwargs: Mapping[str, Any] | None = field(default=None, hash=False)
    """Further values that the template reads, e.g. `enable_thinking`."""
    add_generation_prompt: bool = True
    """End the text where the assistant's message begins."""
    continue_final_message: bool = False
    """End the text inside of the last message, so that the model goes on with it; without `add_generation_prompt`."""
    add_special_tokens: bool = False
    """Put those around the text that the model expects around texts. Templates mostly write them themselves."""

    def __post_init__(self) -> None:
        """Check the values together."""
        if self.add_generation_prompt and self.continue_final_message:
            raise RequestError(
                "continue_final_message beside add_generation_prompt",
                got="both are true",
                expected="one of them: the model goes on with the last message, or begins one of its own",
                hint="to have the last message continued, say add_generation_prompt=false",
                param="continue_final_message",
            )

    def template_values(self) -> dict[str, Any]:
        """Return the values that the template reads."""
        values = dict(self.chat_template_kwargs or {})
        if self.tools is not None:
            values["tools"] = list(self.tools)
        return values


class RenderingOptions(TypedDict, total=False):
    """The fields of `Rendering`, as keywords of `chat`."""

    tools: Sequence[Mapping[str, Any]] | None
    chat_template: str | None
    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool
    continue_final_message: bool
    add_special_tokens: bool


PLAIN_RENDERING = Rendering()


MAX_JSON_DEPTH = 200
"""Levels of lists and objects in a body, and in the arguments of a call: what the JSON parser follows."""


def arguments_object(text: str) -> dict[str, Any] | None:
    """Return the arguments of a call as an object; nothing, null and an empty list are an empty one.

    None: they are no JSON object, were cut off, or are nested too deeply.
    """
    try:
        value = from_json(text.strip() or "{}")
        json.dumps(value, allow_nan=False)
    except ValueError:
        return None
    return {} if value is None or value == [] else value if isinstance(value, dict) else None


def unread_arguments(text: str) -> dict[str, Any]:
    """Return arguments that are no object as one: so Anthropic's API has them, and chat templates write them."""
    return {"INVALID_JSON": text}


def shown_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call as an object, whatever they are."""
    value = arguments_object(text)
    return unread_arguments(text) if value is None else value


class CallArguments(dict[str, Any]):
    """The arguments of a replayed call, as templates want them: most write an object as JSON, some join a text.

    A text is the one that the model wrote, so that the prompt begins like the one before.
    """

    def __init__(self, values: Mapping[str, Any], text: str = "") -> None:
        """Keep both.

        Args:
            values: The object.
            text: Its JSON; empty: as Python writes it.
        """
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return self._text or json.dumps(self, ensure_ascii=False)

    def __add__(self, behind: str) -> str:
        return str(self) + behind

    def __radd__(self, before: str) -> str:
        return before + str(self)


def plain_conversation(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages as a chat template reads them."""
    return [_plain_message(message) for message in messages]


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in message.items() if value is not None}
    if plain.get("role") == "developer":  # OpenAI's newer word; templates know the older one
        plain["role"] = "system"
    plain["content"] = _plain_content(message.get("content"))
    if isinstance(calls := plain.get("tool_calls"), Sequence):
        plain["tool_calls"] = [_plain_call(call) for call in calls]
    return plain


def _plain_content(content: Any) -> Any:
    """Return texts in parts as one text, and content with other parts as it is."""
    if content is None:
        return ""
    if isinstance(content, str) or not isinstance(content, Sequence):
        return content
    texts = [part["text"] for part in content if _is_text(part)]
    return "\n".join(texts) if len(texts) == len(content) else content


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _plain_call(call: Any) -> Any:
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping):
        plain = CallArguments(arguments)
    else:
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, default=str)
        values = shown_arguments(text)
        plain = CallArguments(values, text.strip() if values else "")
    return {**call, "function": {**function, "arguments": plain}}

"""How a conversation becomes the text that the model continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from raypp.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class Rendering:
    """What the chat template is told besides the messages.

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

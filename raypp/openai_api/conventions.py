"""How a model writes thoughts and tool calls into its text. Only one way is known: Qwen3's.

<think>                                   <tool_call>
why ...                                   {"name": "f", "arguments": {"x": 1}}
</think>                                  </tool_call>

the answer
"""

from __future__ import annotations

from dataclasses import dataclass

from raypp.api.tokenizer import Tokenizer

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ChatConventions:
    """What a model's text may hold besides the answer."""

    has_thoughts: bool = False
    has_calls: bool = False

    @classmethod
    def of(cls, tokenizer: Tokenizer | None) -> ChatConventions:
        """Return those of a model: who has been taught them has tokens for them."""
        if tokenizer is None:
            return cls()
        return cls(
            has_thoughts=tokenizer.has_tokens(THINK, END_THINK),
            has_calls=tokenizer.has_tokens(CALL, END_CALL),
        )


def begins_in_thought(prompt_end: str) -> bool:
    """Return whether a prompt leaves off inside of a thought, by the end of its text."""
    return prompt_end.rstrip().endswith(THINK)

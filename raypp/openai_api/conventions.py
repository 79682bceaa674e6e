"""How a model writes thoughts and tool calls into its text. Two ways of calling are known, Qwen3's and Llama 3's.

<think>                    <tool_call>                                       {"name": "f", "parameters": {"x": 1}}
why ...                    {"name": "f", "arguments": {"x": 1}}
</think>                   </tool_call>                                      or the same behind <|python_tag|>

the answer
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Literal

from raypp.api.tokenizer import Tokenizer
from raypp.types import CompletionOutput

THINK, END_THINK = "<think>", "</think>"
_SWITCHES = ("enable_thinking", "reasoning_effort")


@dataclass(frozen=True)
class CallSyntax:
    """How a family of models writes a call: a JSON object with `name` and the arguments, maybe between tags."""

    taught_tokens: tuple[str, ...]
    """Tokens that the vocabulary of such a model has."""
    tag: str
    """Announces a call, wherever it stands."""
    end_tag: str
    """Ends it. Empty: the object's brace does, and at the start of an answer or behind a call a brace begins one."""
    arguments_key: Literal["arguments", "parameters"]
    """The arguments' name in the object; either is understood."""
    separator: str | None
    """Between the calls of one answer that is held to a form; None: such an answer has one call."""

    def begin(self, name: str) -> str:
        """Return what a call of this function begins with, up to its arguments, when it is held to a form."""
        before = f"{self.tag}\n" if self.end_tag else ""
        return f'{before}{{"name": "{name}", "{self.arguments_key}": '

    @property
    def end(self) -> str:
        """What then comes behind the arguments."""
        return f"}}\n{self.end_tag}" if self.end_tag else "}"

    @property
    def trigger(self) -> str:
        """With what free text goes over into such a call."""
        return self.tag if self.end_tag else '{"name": "'


QWEN3_CALLS = CallSyntax(
    taught_tokens=("<tool_call>", "</tool_call>"),
    tag="<tool_call>",
    end_tag="</tool_call>",
    arguments_key="arguments",
    separator="\n",
)
LLAMA3_CALLS = CallSyntax(
    # Special tokens: they have no text unless a request asks for it, so a form has none of them.
    taught_tokens=("<|python_tag|>", "<|eom_id|>"),
    tag="<|python_tag|>",
    end_tag="",
    arguments_key="parameters",
    separator=None,  # its chat template refuses conversations with several calls in one message
)


@dataclass(frozen=True)
class ChatConventions:
    """What a model's text may hold besides the answer."""

    has_thoughts: bool = False
    calls: CallSyntax | None = None
    template_switches: frozenset[str] = frozenset()
    """What of `enable_thinking` and `reasoning_effort` the chat template reads."""

    def reads(self, name: str) -> bool:
        """Return whether the chat template reads one of these values."""
        return name in self.template_switches

    @classmethod
    def of(cls, tokenizer: Tokenizer | None) -> ChatConventions:
        """Return those of a model: who has been taught them has tokens for them."""
        if tokenizer is None:
            return cls()
        known = (QWEN3_CALLS, LLAMA3_CALLS)
        return cls(
            has_thoughts=tokenizer.has_tokens(THINK, END_THINK),
            calls=next((calls for calls in known if tokenizer.has_tokens(*calls.taught_tokens)), None),
            template_switches=frozenset(name for name in _SWITCHES if tokenizer.template_reads(name)),
        )


def begins_in_thought(prompt: str, continued: str = "") -> bool:
    """Return whether a prompt leaves off inside of a thought.

    Args:
        prompt: The rendered conversation. Templates leave it at the beginning of a thought.
        continued: The message that the model goes on with, if it does; it may have begun one.
    """
    return prompt.rstrip().endswith(THINK) or continued.rfind(THINK) > continued.rfind(END_THINK)


def num_thought_tokens(tokenizer: Tokenizer, answer: CompletionOutput, *, is_begun: bool = False) -> int:
    """Return how many tokens of an answer are the thought in front of it, its tags included.

    Args:
        tokenizer: The model's.
        answer: As far as it has come. Tags that the model spelled in pieces are found when it has ended.
        is_begun: Whether the prompt leaves off inside of the thought.
    """
    token_ids, begin, end = answer.token_ids, tokenizer.token_id(THINK), tokenizer.token_id(END_THINK)
    if begin is None or end is None:
        return 0
    text = answer.text if answer.finish_reason is not None else ""
    start = 0
    if not is_begun:
        at = (index for index, token in enumerate(token_ids) if not tokenizer.token_text(token).isspace())
        start = next(at, len(token_ids))
        if token_ids[start : start + 1] != [begin] and not text.lstrip().startswith(THINK):
            return 0
    if end in token_ids:
        return token_ids.index(end) + 1 - start
    if END_THINK not in text:
        return len(token_ids) - start
    lengths = range(len(token_ids) + 1)
    return bisect_left(lengths, True, key=lambda n: END_THINK in tokenizer.decode(token_ids[:n])) - start

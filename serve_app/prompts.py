"""Texts and conversations to token ids, long ones beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from raypp.api.picture_prompts import EncodedPrompt, PicturePrompts
from raypp.api.tokenizer import ChatMessage, Tokenizer
from raypp.errors import RequestError
from raypp.messages import Int32s
from raypp.pictures.content import has_pictures
from raypp.pictures.reader import PictureReader

T = TypeVar("T")

_MAX_INLINE_CHARS = 16_384
"""About a millisecond of tokenizing. More would hold up every stream of the replica."""

_NOT_FOR_TEMPLATES = frozenset(
    {
        "chat_template",
        "conversation",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "add_generation_prompt",
        "continue_final_message",
    }
)
"""Arguments of the rendering itself. Whoever sends a request must not bring the template: it is a program."""


class PromptEncoder:
    """Tokenizes for one model, and reads its pictures."""

    def __init__(self, tokenizer: Tokenizer | None, pictures: PictureReader | None = None) -> None:
        self._tokenizer = tokenizer
        self._pictures = pictures

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            RequestError: the engine has none.
        """
        if self._tokenizer is None:
            raise RequestError(
                "this takes a tokenizer, and the engine was made with skip_tokenizer_init",
                expected="a prompt of token ids",
            )
        return self._tokenizer

    async def text(self, text: str, *, add_special_tokens: bool = True) -> Int32s:
        """Return a text's token ids, int32 [T].

        Raises:
            RequestError: a text that is not valid Unicode, or an engine without a tokenizer.
        """
        tokenizer = self.tokenizer
        [token_ids] = await _beside_if_long(
            len(text), lambda: tokenizer.encode([text], add_special_tokens=add_special_tokens)
        )
        return token_ids

    async def chat(self, messages: Sequence[ChatMessage], template_kwargs: Mapping[str, Any]) -> EncodedPrompt:
        """Return a conversation, up to where the assistant's message begins.

        Raises:
            RequestError: the model's template refuses it, there is no template or tokenizer, or a picture is at fault.
        """
        prompts = PicturePrompts(self.tokenizer, self._pictures)
        for name in _NOT_FOR_TEMPLATES & template_kwargs.keys():
            raise RequestError(f"chat_template_kwargs must not have {name}", got=repr(template_kwargs[name])[:80])

        num_chars = sum(len(str(message["content"])) for message in messages)
        if has_pictures(messages):
            num_chars = _MAX_INLINE_CHARS + 1  # whatever their addresses are: reading them takes long
        return await _beside_if_long(num_chars, lambda: prompts.chat(messages, template_kwargs))

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones left out."""
        tokenizer = self.tokenizer
        return await _beside_if_long(len(token_ids), lambda: tokenizer.decode(token_ids))


async def _beside_if_long(num_chars: int, work: Callable[[], T]) -> T:
    return work() if num_chars <= _MAX_INLINE_CHARS else await asyncio.to_thread(work)

"""Texts and conversations to token ids, long ones beside the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from raypp.api.picture_prompts import EncodedPrompt, PicturePrompts
from raypp.api.tokenizer import ChatMessage, Tokenizer
from raypp.errors import RequestError
from raypp.messages import Int32s
from raypp.pictures.content import has_pictures
from raypp.pictures.reader import PictureReader
from raypp.types import Prompt
from serve_app.reading_gate import ReadingGate

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

    def __init__(
        self, tokenizer: Tokenizer | None, pictures: PictureReader | None = None, gate: ReadingGate | None = None
    ) -> None:
        """Encode for one model.

        Args:
            tokenizer: The model's, if it has one.
            pictures: Reads pictures; None for a model that takes text alone.
            gate: Bounds the requests whose pictures are read; None: nothing does.
        """
        self._tokenizer = tokenizer
        self._pictures = pictures
        self._entered = contextlib.nullcontext if gate is None else gate.entered

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
        """Return a text's token ids, int32 [T]. Raises as `texts` does."""
        [token_ids] = await self.texts([text], add_special_tokens=add_special_tokens)
        return token_ids

    async def completion(
        self, prompts: Sequence[Prompt], check_tokens: Callable[[int, int], None]
    ) -> list[EncodedPrompt]:
        """Return the prompts of one body.

        Args:
            prompts: Texts and lists of token ids.
            check_tokens: Called with the number of prompts and of their tokens so far; raises when they are too many.

        Raises:
            RequestError: as `texts`, and what `check_tokens` raises.
        """
        check = partial(check_tokens, len(prompts))
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        check(sum(len(prompt["prompt_token_ids"]) for prompt in prompts if not isinstance(prompt, str)))
        encoded = iter(await self.texts(texts, check_tokens=check) if texts else ())
        return [
            EncodedPrompt(next(encoded), text=prompt)
            if isinstance(prompt, str)
            else EncodedPrompt(np.asarray(prompt["prompt_token_ids"]))
            for prompt in prompts
        ]

    async def echoes(self, prompts: Sequence[EncodedPrompt]) -> list[str]:
        """Return the prompts' texts, of token ids without special tokens."""
        num_tokens = sum(len(prompt.token_ids) for prompt in prompts if prompt.text is None)

        def text_of(prompt: EncodedPrompt) -> str:
            if prompt.text is not None:
                return prompt.text
            known = prompt.token_ids[prompt.token_ids < self.tokenizer.vocab_size]  # the engine will refuse others
            return self.tokenizer.decode(known.tolist())

        return await _beside_if_long(num_tokens, lambda: [text_of(prompt) for prompt in prompts])

    async def texts(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        check_tokens: Callable[[int], None] = lambda _: None,
    ) -> list[Int32s]:
        """Return the token ids of each text, int32 [T].

        Many are tokenized a slice at a time: nobody waits for all of them.

        Args:
            texts: What to tokenize.
            add_special_tokens: Put those around each text that the model expects there.
            check_tokens: Called with the number of tokens so far; raises when they are too many.

        Raises:
            ContextLengthError: a text that is longer than the model's context.
            RequestError: a text that is not valid Unicode, or an engine without a tokenizer.
        """
        tokenizer, num_tokens = self.tokenizer, 0
        token_ids: list[Int32s] = []
        is_long = sum(map(len, texts)) > _MAX_INLINE_CHARS
        for piece in _slices(texts, _MAX_INLINE_CHARS):
            encode = partial(tokenizer.encode, piece, add_special_tokens=add_special_tokens)
            encoded = await asyncio.to_thread(encode) if is_long else encode()
            num_tokens += sum(map(len, encoded))
            check_tokens(num_tokens)
            token_ids += encoded
        return token_ids

    async def chat(self, messages: Sequence[ChatMessage], template_kwargs: Mapping[str, Any]) -> EncodedPrompt:
        """Return a conversation, up to where the assistant's message begins.

        Raises:
            RequestError: the model's template refuses it, there is no template or tokenizer, or a picture is at fault.
            QueueFullError: too many others have pictures, or these wait for too long.
        """
        prompts = PicturePrompts(self.tokenizer, self._pictures)
        for name in _NOT_FOR_TEMPLATES & template_kwargs.keys():
            raise RequestError(f"chat_template_kwargs must not have {name}", got=repr(template_kwargs[name])[:80])

        def encode(messages: Sequence[ChatMessage]) -> EncodedPrompt:
            return prompts.chat(messages, template_kwargs)

        if self._pictures is not None and has_pictures(messages):
            async with self._entered():
                return await self._pictures.beside.messages(messages, encode)
        num_chars = sum(len(str(message["content"])) for message in messages)
        return await _beside_if_long(num_chars, lambda: encode(messages))

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones left out."""
        tokenizer = self.tokenizer
        return await _beside_if_long(len(token_ids), lambda: tokenizer.decode(token_ids))


def _slices(texts: Sequence[str], max_chars: int) -> Iterator[list[str]]:
    """Yield the texts in order, in lists of about so many characters. A text counts as one more: it is work, too."""
    piece: list[str] = []
    num_chars = 0
    for text in texts:
        piece.append(text)
        num_chars += len(text) + 1
        if num_chars >= max_chars:
            yield piece
            piece, num_chars = [], 0
    if piece:
        yield piece


async def _beside_if_long(num_chars: int, work: Callable[[], T]) -> T:
    return work() if num_chars <= _MAX_INLINE_CHARS else await asyncio.to_thread(work)

"""The forms of a prompt, and how one becomes tokens: text is rendered and tokenized, and images get their places."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from raypp.api.conversation import PLAIN_RENDERING, Rendering
from raypp.api.request_text import StopScope, WholeText
from raypp.api.tokenizer import ChatMessage, Tokenizer
from raypp.errors import RequestError
from raypp.messages import Int32s
from raypp.models.vision_config import VisionConfig
from raypp.pictures.content import Content, sources_as_contents, take_pictures
from raypp.pictures.patches import place_pictures
from raypp.pictures.reader import PictureMarks, PictureReader
from raypp.prompt_items import PromptItems
from raypp.sampling_params import MAX_CACHE_SALT_CHARS

PROMPT_FORMS = 'a str, a list of token ids, {"prompt": "..."} or {"prompt_token_ids": [...]}'
_PICTURES, _SALT = "multi_modal_data", "cache_salt"


@dataclass(frozen=True)
class PromptForm:
    """What is in a prompt: text or token ids, images perhaps."""

    text: str | None = None
    token_ids: Any = None  # there where text is not; not checked yet
    images: Any = None  # one, or a list of them; None: none
    cache_salt: str = ""


def is_one_prompt(given: object) -> bool:
    """Return whether this is a prompt, not a list of prompts. A list of numbers is one."""
    if isinstance(given, np.ndarray):
        return given.ndim == 1 and given.dtype.kind in "iu"
    if isinstance(given, list | tuple):
        return bool(given) and isinstance(given[0], int | np.integer)
    return isinstance(given, str | Mapping)


def read_prompt(prompt: object, request_id: str) -> PromptForm:
    """Return what is in a prompt.

    Raises:
        RequestError: it has none of the forms.
    """
    if isinstance(prompt, str):
        return PromptForm(text=prompt)
    if isinstance(prompt, list | tuple | np.ndarray):
        return PromptForm(token_ids=prompt)
    if not isinstance(prompt, Mapping):
        raise RequestError(
            "a prompt of the wrong type",
            request_id=request_id,
            got=f"{repr(prompt)[:80]} ({type(prompt).__name__})",
            expected=PROMPT_FORMS,
            hint="chat() takes conversations",
        )
    has_text = isinstance(prompt.get("prompt"), str)
    if set(prompt) - {_PICTURES, _SALT} != ({"prompt"} if has_text else {"prompt_token_ids"}):
        raise RequestError(
            "a prompt with the wrong keys",
            request_id=request_id,
            got=sorted(map(str, prompt)),
            expected=f"{PROMPT_FORMS}; {_PICTURES} and {_SALT} may stand beside either",
            hint="text goes under prompt, as a str, token ids under prompt_token_ids",
        )
    images = _images_of(prompt, request_id) if _PICTURES in prompt else None
    salt = _salt_of(prompt, request_id) if _SALT in prompt else ""
    if has_text:
        return PromptForm(prompt["prompt"], None, images, salt)
    return PromptForm(None, prompt["prompt_token_ids"], images, salt)


def _salt_of(prompt: Mapping[Any, Any], request_id: str) -> str:
    salt = prompt[_SALT]
    if not isinstance(salt, str) or not 0 < len(salt) <= MAX_CACHE_SALT_CHARS:
        raise RequestError(
            f"{_SALT} of a prompt is no name",
            request_id=request_id,
            got=repr(salt)[:80],
            expected=f"a str of 1 to {MAX_CACHE_SALT_CHARS:,} characters",
            hint="prompts of the same salt share what is cached of their beginnings; left out, all such prompts do",
        )
    return salt


def _images_of(prompt: Mapping[Any, Any], request_id: str) -> Any:
    data = prompt[_PICTURES]
    if not isinstance(data, Mapping) or set(data) != {"image"}:
        raise RequestError(
            f"{_PICTURES} of a prompt holds images",
            request_id=request_id,
            got=repr(data)[:80],
            expected='{"image": image} or {"image": [image, ...]}',
            hint="chat() takes videos too",
        )
    return data["image"]


_CUT = "\ufdd0\ufdd1"
"""Where a placeholder that a message spells is cut, so that no token is the whole of it. No text has these: they are
noncharacters of Unicode."""


@dataclass(frozen=True, eq=False, slots=True)
class EncodedPrompt:
    """A prompt that is tokenized, with what of it is not text: what a caller that tokenizes by itself hands in."""

    token_ids: Int32s  # [T]
    items: PromptItems | None = None
    text: str | None = None
    cache_salt: str = ""  # prompts of different salts share nothing of the prefix cache
    make_stop_scope: Callable[[], StopScope] = WholeText  # of which parts of a continuation stop strings are about


class PicturePrompts:
    """Encodes prompts that may hold images. May be used from several threads; reading an image takes its time.

    Args:
        tokenizer: The model's.
        reader: Of the model's images; None for a model that takes none.
    """

    def __init__(self, tokenizer: Tokenizer, reader: PictureReader | None) -> None:
        self._tokenizer = tokenizer
        self._reader = reader

    def chat(
        self, messages: Sequence[ChatMessage], rendering: Rendering = PLAIN_RENDERING, *, max_kept: int | None = None
    ) -> EncodedPrompt:
        """Return a conversation, up to where the assistant's message begins.

        Args:
            messages: The conversation; without images for a model that takes none.
            rendering: Further values for the chat template.
            max_kept: As of `Tokenizer.encode`; conversations with images are not cut.

        Raises:
            RequestError: an image cannot be read, or the model's template refuses the messages.
        """
        if self._reader is None:
            text = self._tokenizer.render_chat(messages, rendering)
            return self._tokenized(text, add_special_tokens=rendering.add_special_tokens, max_kept=max_kept)
        plain, contents = take_pictures(messages)
        text = self._tokenizer.render_chat(self._with_cut_marks(plain, self._reader), rendering)
        return self._encoded(text, contents, add_special_tokens=rendering.add_special_tokens, max_kept=max_kept)

    def text(self, text: str, images: Any) -> EncodedPrompt:
        """Return a text with one of the model's marks for each image; `images` is one, or a list of them.

        Raises:
            RequestError: an image cannot be read, the model takes none, or there are not as many marks.
        """
        return self._encoded(text, sources_as_contents(images), add_special_tokens=True)

    def tokens(self, token_ids: Int32s, images: Any) -> EncodedPrompt:
        """Return a tokenized prompt with one placeholder for each image. Raises as `text` does."""
        reader = self.needed_reader()
        pictures = reader.read(sources_as_contents(images))
        expanded, items = place_pictures(token_ids, [item for p in pictures for item in p.items], reader.config)
        return EncodedPrompt(expanded, items)

    def _encoded(
        self, text: str, contents: Sequence[Content], *, add_special_tokens: bool, max_kept: int | None = None
    ) -> EncodedPrompt:
        if not contents:
            return self._tokenized(text, add_special_tokens=add_special_tokens, max_kept=max_kept)
        reader = self.needed_reader()
        pictures = reader.read(contents)
        config = reader.config
        marked = reader.mark_pictures(text, pictures, self._marks(config))
        prompt = self._tokenized(marked, add_special_tokens=add_special_tokens)
        expanded, items = place_pictures(prompt.token_ids, [item for p in pictures for item in p.items], config)
        if max_kept is not None and len(expanded) > max_kept:
            raise RequestError(
                "a prompt with images cannot be cut",
                got=f"{len(expanded)} tokens, and truncate_prompt_tokens={max_kept}",
                expected=f"at most {max_kept} tokens",
                hint="shorten the conversation, or leave truncate_prompt_tokens out",
                param="truncate_prompt_tokens",
            )
        return EncodedPrompt(expanded, items, text.replace(_CUT, ""))

    def _tokenized(self, text: str, *, add_special_tokens: bool, max_kept: int | None = None) -> EncodedPrompt:
        """Return the tokens of a text: what is cut in it is tokenized apart."""
        first, *more = text.split(_CUT)
        encode = partial(self._tokenizer.encode, max_kept=max_kept)
        encoded = [*encode([first], add_special_tokens=add_special_tokens), *encode(more, add_special_tokens=False)]
        kept = slice(None if max_kept is None else -max_kept, None)
        return EncodedPrompt(np.concatenate(encoded)[kept], text=first + "".join(more))

    def _with_cut_marks(self, messages: list[dict[str, Any]], reader: PictureReader) -> list[dict[str, Any]]:
        """Return messages whose texts hold no placeholder of the model; those that they spell are cut."""
        config = reader.config
        placeholders = list(config.placeholder_ids)
        if config.marks_in_prompts != "all":
            placeholders.append(config.vision_start_token_id)
        spelled = re.compile("|".join(map(re.escape, self._tokenizer.token_texts(placeholders))))

        def cut(value: Any) -> Any:
            if isinstance(value, str):
                return spelled.sub(lambda found: found[0][0] + _CUT + found[0][1:], value)
            if isinstance(value, Mapping):
                return {key: cut(one) for key, one in value.items()}
            return [cut(one) for one in value] if isinstance(value, list | tuple) else value

        return [cut(message) for message in messages]

    def _marks(self, config: VisionConfig) -> PictureMarks:
        ids = [config.vision_start_token_id, config.vision_end_token_id, *config.placeholder_ids]
        texts = self._tokenizer.token_texts(ids)
        start, end, image, *video = texts
        if not (start and end and image):
            raise RequestError(
                "the model's tokenizer has no text for the marks of an image",
                got=dict(zip(ids, texts, strict=True)),
                expected="a text for each of these tokens",
                hint="images with the tokenizer that came with the model",
            )
        return PictureMarks(start, end, image, video[0] if video else "", config.marks_in_prompts)

    def needed_reader(self) -> PictureReader:
        """Return the reader.

        Raises:
            RequestError: the model takes no images.
        """
        if self._reader is None:
            raise RequestError("this model takes no images", got="an image", expected="text only")
        return self._reader

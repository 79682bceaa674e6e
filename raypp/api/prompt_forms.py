"""The forms that a prompt may have, and what each of them holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from raypp.errors import RequestError
from raypp.request_limits import MAX_CACHE_SALT_CHARS

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
    is_list = isinstance(given, list | tuple) and bool(given)
    return isinstance(given, str | Mapping) or (is_list and isinstance(given[0], int | np.integer))  # type: ignore[index]


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

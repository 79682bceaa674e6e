"""The model's tokens as xgrammar and llguidance want them: which bytes each writes, and which of them end a text."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from raypp.errors import RequestError


@dataclass(frozen=True)
class Vocabulary:
    """xgrammar's `TokenizerInfo`, once for any text, once for JSON, once for what asks for special tokens."""

    text: Any
    json: Any  # without tokens that hold control characters: JSON writes them otherwise, and xgrammar lets some pass
    with_special: Any  # special tokens can be asked for by their ids, and may stand where text is not looked at

    def of(self, kind: str, value: Any) -> Any:
        """Return the one for a constraint."""
        if kind == "structural_tag" and _asks_for_token(json.loads(value)):
            return self.with_special
        return self.json if kind in ("json_schema", "json_object") else self.text

    @cached_property
    def llguidance(self) -> Any:
        """The `LLTokenizer` of llguidance, which lets no control character into JSON by itself."""
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(
            TokenizerWrapper(_Tokens(self.text)),
            eos_token=list(self.text.stop_token_ids),
            slices=LLTokenizer.json_slices(),
        )


class _Tokens:
    """A tokenizer as llguidance's wrapper wants it. Nothing is tokenized: what comes are tokens."""

    bos_token_id = None

    def __init__(self, info: Any) -> None:
        self.eos_token_id = info.stop_token_ids[0]
        self.special_token_ids = info.stop_token_ids
        # A first byte of 255, which no text has, would make a special token of one.
        self.tokens = [b"" if token[:1] == b"\xff" else token for token in info.decoded_vocab]

    def __call__(self, text: bytes) -> list[int]:
        return []


@dataclass(frozen=True)
class VocabularySource:
    """Where the tokens come from: plain data."""

    model_path: str
    vocab_size: int  # of the model's logits
    eos_token_ids: tuple[int, ...]

    def load(self) -> Vocabulary:
        """Return the vocabulary.

        Special tokens have no text, so no grammar derives one by what it writes. A structural tag may ask for one by
        its id: for such a tag each is a byte that no text has.

        Raises:
            RequestError: no tokenizer, no end token, or no xgrammar or llguidance.
        """
        if not self.eos_token_ids:
            raise RequestError(
                "a text under a grammar must be able to end, and the model has no end token",
                expected="eos_token_id in config.json or generation_config.json",
                param="structured_outputs",
            )
        try:
            import xgrammar
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(self.model_path, local_files_only=True)
            stop_token_ids = [token_id for token_id in self.eos_token_ids if token_id < self.vocab_size]
            detected = xgrammar.TokenizerInfo.from_huggingface(
                tokenizer, vocab_size=self.vocab_size, stop_token_ids=stop_token_ids
            )
            special = _special_token_ids(tokenizer)
            texts = _texts(tokenizer, self.vocab_size, special=special)
            written = detected.decoded_vocab
            in_json = [
                "" if min(token, default=0x20) < 0x20 else text for text, token in zip(texts, written, strict=True)
            ]

            def info(of: list[Any]) -> Any:
                return xgrammar.TokenizerInfo(
                    of,
                    detected.vocab_type,
                    vocab_size=self.vocab_size,
                    stop_token_ids=stop_token_ids,
                    add_prefix_space=detected.add_prefix_space,
                )

            no_text: Any = {"RAW": b"\xff", "BYTE_FALLBACK": "<0xFF>", "BYTE_LEVEL": "\xff"}[detected.vocab_type.name]
            with_special = [no_text if token in special else text for token, text in enumerate(texts)]
            vocabulary = Vocabulary(info(texts), info(in_json), info(with_special))
            _ = vocabulary.llguidance  # made here, once for all processes that are forked
            return vocabulary
        except Exception as error:  # whatever a broken or a missing tokenizer makes of it
            raise RequestError(
                "this engine cannot serve structured_outputs",
                got=f"{type(error).__name__}: {error}",
                expected="a tokenizer beside the model, and the packages xgrammar and llguidance",
                param="structured_outputs",
            ) from error


def _asks_for_token(form: Any) -> bool:
    if isinstance(form, list):
        return any(map(_asks_for_token, form))
    if not isinstance(form, dict) or form.get("type") == "json_schema":
        return False
    return form.get("type") == "token" or any(map(_asks_for_token, form.values()))


def _texts(tokenizer: Any, vocab_size: int, *, special: Collection[int]) -> list[str]:
    texts = [""] * vocab_size
    for text, token_id in tokenizer.get_vocab().items():
        if token_id < vocab_size and token_id not in special:
            texts[token_id] = text
    return texts


def _special_token_ids(tokenizer: Any) -> frozenset[int]:
    """Return the tokens that have no text when special ones are left out."""
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(token_id for token_id, token in added if token.special) | frozenset(tokenizer.all_special_ids)

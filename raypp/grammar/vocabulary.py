"""The model's tokens as llguidance wants them: which bytes each writes, and which of them end a text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from raypp.errors import RequestError

_SPECIAL = b"\xff"
"""With this byte, which no text has, llguidance has the names of special tokens begin."""


@dataclass(frozen=True)
class Vocabulary:
    """What grammars are compiled for."""

    tokenizer: Any  # llguidance's `LLTokenizer`
    vocab_size: int
    stop_token_ids: frozenset[int]

    @classmethod
    def of_tokens(cls, tokens: Sequence[bytes], stop_token_ids: Iterable[int]) -> Vocabulary:
        """Return a vocabulary.

        Args:
            tokens: What each writes. A special one writes nothing, and is named by what follows a first byte of 255.
            stop_token_ids: Those that end a text, at least one. They write nothing.
        """
        from llguidance import LLTokenizer, TokenizerWrapper

        ends = sorted(stop_token_ids)
        tokenizer = LLTokenizer(
            TokenizerWrapper(_Tokens(tokens, ends)), eos_token=ends, slices=LLTokenizer.json_slices()
        )
        return cls(tokenizer, len(tokens), frozenset(ends))


@dataclass(frozen=True)
class VocabularySource:
    """Where the tokens come from: plain data."""

    model_path: str
    vocab_size: int  # of the model's logits
    eos_token_ids: tuple[int, ...]

    def load(self) -> Vocabulary:
        """Return the vocabulary. It holds the GIL for up to a second at a time where there are 152,000 tokens.

        Raises:
            RequestError: no tokenizer, no end token, or no llguidance.
        """
        if not self.eos_token_ids:
            raise RequestError(
                "a text under a grammar must be able to end, and the model has no end token",
                expected="eos_token_id in config.json or generation_config.json",
                param="structured_outputs",
            )
        try:
            stop_token_ids = [token_id for token_id in self.eos_token_ids if token_id < self.vocab_size]
            return Vocabulary.of_tokens(self._tokens(), stop_token_ids)
        except Exception as error:  # whatever a broken or a missing tokenizer makes of it
            raise RequestError(
                "this engine cannot serve structured_outputs",
                got=f"{type(error).__name__}: {error}",
                expected="a tokenizer beside the model, and the package llguidance",
                param="structured_outputs",
            ) from error

    def _tokens(self) -> list[bytes]:
        """Return what each token writes. Added tokens that are not special are text, like `<think>`."""
        from llguidance import LLTokenizer

        folder = Path(self.model_path)
        written = _read(folder / "tokenizer.json") or _converted(self.model_path)
        tokenizer = LLTokenizer(written, slices=[])
        tokens = [tokenizer.decode_bytes([token_id]) for token_id in range(min(tokenizer.vocab_size, self.vocab_size))]
        tokens += [b""] * (self.vocab_size - len(tokens))
        decoder = json.loads(_read(folder / "tokenizer_config.json") or "{}").get("added_tokens_decoder", {})
        added = [*json.loads(written)["added_tokens"], *({"id": int(key), **token} for key, token in decoder.items())]
        for token in added:
            if token["id"] < self.vocab_size:
                tokens[token["id"]] = (_SPECIAL if token.get("special") else b"") + token["content"].encode()
        return tokens


class _Tokens:
    """A tokenizer as llguidance's wrapper wants it. Nothing is tokenized: what comes are tokens."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], stop_token_ids: list[int]) -> None:
        self.eos_token_id = stop_token_ids[0]
        self.special_token_ids = stop_token_ids
        self.tokens = tokens

    def __call__(self, text: bytes) -> list[int]:
        return []


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _converted(model_path: str) -> str:
    """Return the text of the `tokenizer.json` that transformers makes of a tokenizer's other files."""
    if not any(file for name in ("vocab", "tokenizer", "tekken") for file in Path(model_path).glob(f"*{name}*")):
        raise FileNotFoundError(f"no tokenizer.json in {model_path}")  # sooner said than what follows is imported
    from transformers import AutoTokenizer

    own = {"mistral_format": False} if find_spec("mistral_common") else {}  # else it may take that one's tokenizer
    tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True, **own)
    written: str = tokenizer.backend_tokenizer.to_str()
    return written

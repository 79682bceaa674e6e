"""Small tokenizers of the kinds that models have, made on the spot: byte-level ones, and SentencePiece's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from raypp.api.tokenizer import Tokenizer

WORDS = [
    "The",
    "capital",
    "of",
    "France",
    "is",
    "Paris",
    "and",
    "Rome",
    "Stra\u00dfe",
    "\u043c\u0438\u0440",
    "\u4e16\u754c",
]
SENTENCEPIECE = ("strip", "metaspace", "no-prefix")
KINDS = ("byte-level", *SENTENCEPIECE)


def make_tokenizer(kind: str, path: Path, **options: Any) -> Tokenizer:
    """Write a tokenizer and return it.

    Args:
        kind: `byte-level` as Qwen's; `strip` as Llama 2's, whose decoder strips the first space; `metaspace` as older
            Mistral's, whose decoder leaves it out; `no-prefix` as Gemma's, which puts none in front.
        path: An empty directory.
        options: Of transformers' tokenizer.
    """
    from transformers import PreTrainedTokenizerFast

    backend = _byte_level() if kind == "byte-level" else _sentencepiece(kind)
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", **options).save_pretrained(
        path
    )
    return Tokenizer(path)


def _byte_level() -> Any:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, pre_tokenizers

    names = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = [names.pre_tokenize_str(f" {word}")[0][0] for word in WORDS]
    backend = Backend(_bpe(sorted(pre_tokenizers.ByteLevel.alphabet()), words))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return _with_bos(backend)


def _sentencepiece(kind: str) -> Any:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, normalizers, pre_tokenizers

    letters = sorted({*"\u2581\ufffd", *map(chr, range(0x21, 0x7F)), *"".join(WORDS)})
    backend = Backend(_bpe([f"<0x{byte:02X}>" for byte in range(256)] + letters, [f"\u2581{word}" for word in WORDS]))
    space = decoders.Replace("\u2581", " ")
    if kind == "no-prefix":
        backend.normalizer = normalizers.Replace(" ", "\u2581")
        backend.decoder = decoders.Sequence([space, decoders.ByteFallback(), decoders.Fuse()])
    elif kind == "strip":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        backend.decoder = decoders.Sequence(
            [space, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        backend.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first", split=False), decoders.Fuse()]
        )
    return _with_bos(backend)


def _bpe(letters: list[str], words: list[str]) -> Any:
    from tokenizers import models

    names, merges = ["<s>", "</s>", "<|mark|>", *letters], []
    for word in words:
        for end in range(1, len(word)):
            merges.append((word[:end], word[end]))
            names.append(word[: end + 1])
    vocabulary = {name: index for index, name in enumerate(dict.fromkeys(names))}
    return models.BPE(vocabulary, list(dict.fromkeys(merges)), byte_fallback="<0x00>" in vocabulary)


def _with_bos(backend: Any) -> Any:
    from tokenizers import processors

    backend.add_special_tokens(["<s>", "</s>", "<|mark|>"])
    backend.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    return backend

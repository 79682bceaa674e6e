"""Which bytes the tokens of a tokenizer write, whatever files it is in."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from raypp.errors import RequestError
from raypp.grammar.compile import compile_constraint
from raypp.grammar.text_grammar import TextGrammar
from raypp.grammar.vocabulary import Vocabulary, VocabularySource
from raypp.models.registry import resolve_model_path
from raypp.structured_outputs import source_of

TINY = Path(resolve_model_path("tiny"))
WORDS = ["▁", "é", "▁é", "a", "▁b", "10"]


def first_tokens(vocabulary: Vocabulary, text: str) -> set[int]:
    """Return the tokens that a text may begin with."""
    compiled = compile_constraint(source_of({"choice": [text]}), vocabulary)
    return allowed(TextGrammar(compiled, None))


def allowed(text: TextGrammar) -> set[int]:
    """Return the tokens that may come next."""
    _, masks = text.masks([])
    return set(np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little")).tolist())


def special_token(vocabulary: Vocabulary, name: str) -> set[int]:
    """Return the tokens that a grammar asks for by a name."""
    compiled = compile_constraint(source_of({"grammar": f"%llguidance {{}}\nstart: {name}"}), vocabulary)
    return allowed(TextGrammar(compiled, None))


def sentencepiece(folder: Path) -> list[str]:
    """Write a tokenizer as of sentencepiece: a mark for the space, tokens for bytes; return all tokens."""
    tokens = ["</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokens


def test_tokens_of_sentencepiece_are_read(tmp_path: Path) -> None:
    tokens = sentencepiece(tmp_path)
    vocabulary = VocabularySource(str(tmp_path), len(tokens), (0,)).load()
    assert first_tokens(vocabulary, " é1") == {1 + ord(" "), tokens.index("▁"), tokens.index("▁é")}
    assert first_tokens(vocabulary, "10") == {1 + ord("1"), tokens.index("10")}
    assert first_tokens(vocabulary, "</s>") == {1 + ord("<")}


@pytest.mark.parametrize("more", [-1, 70])
def test_a_model_may_have_fewer_or_more_logits_than_there_are_tokens(tmp_path: Path, more: int) -> None:
    tokens = sentencepiece(tmp_path)
    vocabulary = VocabularySource(str(tmp_path), len(tokens) + more, (0,)).load()
    found = first_tokens(vocabulary, "10")
    assert found == {1 + ord("1"), *([tokens.index("10")] if more > 0 else [])}
    compiled = compile_constraint(source_of({"choice": ["10"]}), vocabulary)
    assert TextGrammar(compiled, None).masks([])[1].shape == (1, -(-(len(tokens) + more) // 32))


def test_added_tokens_are_text_unless_they_are_special() -> None:
    vocabulary = VocabularySource(str(TINY), 4032, (4018, 4020)).load()
    assert 4030 in first_tokens(vocabulary, "<think>")
    assert 4019 not in first_tokens(vocabulary, "<|im_start|>")
    assert special_token(vocabulary, "<|im_start|>") == {4019}


def test_what_tokenizer_config_says_of_tokens_counts_too(tmp_path: Path) -> None:
    sentencepiece(tmp_path)
    said = {"added_tokens_decoder": {"260": {"content": "<a>", "special": True}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    vocabulary = VocabularySource(str(tmp_path), 263, (0,)).load()
    assert first_tokens(vocabulary, "a") == {1 + ord("a")}
    assert special_token(vocabulary, "<a>") == {260}


def test_other_files_than_tokenizer_json_are_converted(tmp_path: Path) -> None:
    model = json.loads((TINY / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "".join(" ".join(merge) + "\n" for merge in model["merges"])
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}")
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    converted = VocabularySource(str(tmp_path), 4032, (4018,)).load()
    own = VocabularySource(str(TINY), 4032, (4018,)).load()
    assert first_tokens(converted, "def main(") == first_tokens(own, "def main(") != set()


def test_without_an_end_or_a_tokenizer_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="the model has no end token"):
        VocabularySource(str(TINY), 4032, ()).load()
    with pytest.raises(RequestError, match=r"cannot serve structured_outputs.*no tokenizer\.json in"):
        VocabularySource(str(tmp_path), 4032, (1,)).load()

"""One text, one grammar: masks say what may follow, behind drafts too, and looking ahead changes nothing."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy as np
import pytest

from raypp.api.tokenizer import Tokenizer
from raypp.config.engine import EngineConfig
from raypp.errors import RequestError
from raypp.grammar.compile import compile_constraint
from raypp.grammar.text_grammar import MaskRows, TextGrammar
from raypp.grammar.vocabulary import Vocabulary, VocabularySource
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.structured_outputs import as_structured_outputs, source_of

PLAN = plan_engine(EngineConfig.from_flat("tiny"), Hardware(1))
VOCAB_SIZE = PLAN.model.vocab_size
EOS = sorted(PLAN.model.eos_token_ids)


@cache
def vocabulary() -> Vocabulary:
    return VocabularySource(PLAN.model_path, VOCAB_SIZE, tuple(EOS)).load()


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(PLAN.model_path)


def text_grammar(constraint: dict[str, Any], allowed: list[int] | None = None) -> TextGrammar:
    kept = as_structured_outputs(constraint)
    assert kept is not None
    return TextGrammar(1, compile_constraint(source_of(kept), vocabulary(), 1), VOCAB_SIZE, allowed)


def next_masks(text: TextGrammar, drafts: list[int]) -> tuple[list[int], np.ndarray]:
    """Return the drafts with a mask behind them, and all masks."""
    rows = MaskRows(1, VOCAB_SIZE)  # room for one: the others make it grow
    return text.add_masks(drafts, rows), rows.bitmasks(0, rows.count)


def tokens_of(mask: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def walk(text: TextGrammar, rng: random.Random) -> list[int]:
    """Return a text that the grammar allows, without its end."""
    token_ids: list[int] = []
    while True:
        token_id = rng.choice(sorted(tokens_of(next_masks(text, [])[1][0])))
        if token_id in EOS:
            return token_ids
        text.accept([token_id])
        token_ids.append(token_id)


def test_any_way_through_a_grammar_is_a_text_of_it() -> None:
    rng = random.Random(0)
    for _ in range(20):
        text = tokenizer().decode(walk(text_grammar({"choice": ["abc", "abd", "x y"]}), rng))
        assert text in ("abc", "abd", "x y")


def test_masks_behind_drafts_are_those_of_the_longer_text() -> None:
    rng, constraint = random.Random(1), {"regex": "[a-z]{2,4}( [0-9]{1,3}){1,3}\\."}
    for _ in range(10):
        token_ids = walk(text_grammar(constraint), rng)
        wrong_at = rng.randrange(len(token_ids) + 1)
        drafts = [*token_ids[:wrong_at], 4017, *token_ids[wrong_at:]]
        ahead, behind = text_grammar(constraint), text_grammar(constraint)
        followed, masks = next_masks(ahead, drafts)
        assert followed == drafts[: len(followed)]
        for index, mask in enumerate(masks):
            assert (mask == next_masks(behind, [])[1][0]).all()
            if index < len(followed):
                behind.accept([followed[index]])
        assert len(masks) > wrong_at or drafts[len(masks) - 1] not in tokens_of(masks[-1])
        assert (next_masks(ahead, [])[1][0] == masks[0]).all()  # looking ahead moved nothing


def test_the_end_is_the_only_thing_behind_a_whole_text() -> None:
    text = text_grammar({"regex": "ab"})
    text.accept(tokenizer().encode(["ab"])[0])
    assert tokens_of(next_masks(text, [EOS[0]])[1][0]) == set(EOS)
    assert len(next_masks(text, [EOS[0], 5])[1]) == 1


def test_special_tokens_write_nothing() -> None:
    allowed = tokens_of(next_masks(text_grammar({"regex": "(.|\\n)*"}), [])[1][0])
    [start] = tokenizer().encode(["<|im_start|>"])[0:1]
    assert start[0] not in allowed
    assert tokenizer().encode(["<think>"])[0][0] in allowed


def test_allowed_tokens_count_where_any_is_left() -> None:
    [a], [b] = tokenizer().encode(["a", "b"])
    assert tokens_of(next_masks(text_grammar({"regex": "[ab]"}, [b, 9]), [])[1][0]) == {b}
    assert tokens_of(next_masks(text_grammar({"regex": "a"}, [b, 9]), [])[1][0]) == {a}


def test_what_leaves_its_grammar_is_an_error() -> None:
    with pytest.raises(RequestError, match="left its grammar"):
        text_grammar({"regex": "a"}).accept(tokenizer().encode(["b"])[0])
    with pytest.raises(RequestError, match="nothing that the model's tokens can write"):
        next_masks(text_grammar({"grammar": "root ::= root"}), [])

"""One text, one grammar: masks say what may follow, behind drafts too, and looking ahead changes nothing."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy as np
import pytest

from raypp.api.tokenizer import Tokenizer
from raypp.config.engine_config import EngineConfig
from raypp.errors import RequestError
from raypp.grammar.compile import compile_constraint
from raypp.grammar.text_grammar import TextGrammar
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
    return TextGrammar(compile_constraint(source_of(kept), vocabulary()), allowed)


def next_masks(text: TextGrammar, drafts: list[int]) -> tuple[list[int], np.ndarray]:
    """Return the drafts with a mask behind them, and all masks."""
    return text.masks(drafts)


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


def test_an_end_token_that_is_ordinary_text_is_named_where_a_text_would_need_it() -> None:
    [quote] = tokenizer().encode(['"'])[0].tolist()
    ended_by_quote = VocabularySource(PLAN.model_path, VOCAB_SIZE, (quote,)).load()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    kept = as_structured_outputs({"json_schema": {**schema, "additionalProperties": False}})
    assert kept is not None
    text = TextGrammar(compile_constraint(source_of(kept), ended_by_quote), None)
    text.accept(tokenizer().encode(["{"])[0].tolist())
    with pytest.raises(RequestError, match=r"eos_token_id in config\.json") as caught:
        next_masks(text, [])
    assert caught.value.param == "structured_outputs"


def test_any_way_through_a_grammar_is_a_text_of_it() -> None:
    rng = random.Random(0)
    for _ in range(20):
        text = tokenizer().decode(walk(text_grammar({"choice": ["abc", "abd", "x y"]}), rng))
        assert text in ("abc", "abd", "x y")


CONSTRAINTS: list[dict[str, Any]] = [
    {"regex": "[a-z]{2,4}( [0-9]{1,3}){1,3}\\."},
    {"json_schema": {"allOf": [{"type": "string", "pattern": "^[a-z é]*$"}, {"minLength": 2, "maxLength": 9}]}},
]


@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=["regex", "json_schema"])
def test_masks_behind_drafts_are_those_of_the_longer_text(constraint: dict[str, Any]) -> None:
    rng = random.Random(1)
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


@pytest.mark.parametrize("constraint", [{"regex": '"b"'}, {"json_schema": {"const": "b", "not": {"const": "a"}}}])
def test_the_end_is_the_only_thing_behind_a_whole_text(constraint: dict[str, Any]) -> None:
    text = text_grammar(constraint)
    token_ids = list(tokenizer().encode(['"b"'])[0])
    followed, masks = next_masks(text, [*token_ids, EOS[0], 5])
    assert followed == token_ids
    assert tokens_of(masks[-1]) == set(EOS)
    text.accept(token_ids)
    assert tokens_of(next_masks(text, [EOS[0]])[1][0]) == set(EOS)
    assert len(next_masks(text, [EOS[0], 5])[1]) == 1
    text.accept([EOS[-1]])
    with pytest.raises(RequestError, match="left its grammar"):
        text.accept([EOS[0]])


def test_a_grammar_may_be_in_llguidances_lark() -> None:
    text = text_grammar({"grammar": '%llguidance {}\nstart: "a" "\\n" NUMBER\nNUMBER: /[0-9]+/\n'})
    text.accept(tokenizer().encode(["a\n12"])[0])
    assert set(EOS) < tokens_of(next_masks(text, [])[1][0])
    with pytest.raises(RequestError, match="cannot be compiled"):
        text_grammar({"grammar": "%llguidance {}\nstart: missing"})


@pytest.mark.parametrize("options", ["{}", '{"no_forcing": false}'])
def test_what_a_grammar_in_lark_forces_may_be_written_by_any_tokens(options: str) -> None:
    text = text_grammar({"grammar": f'%llguidance {options}\nstart: "It will " ("rain" | "snow")'})
    token_ids = tokenizer().encode(["It will snow"])[0]
    for token_id in token_ids:
        assert token_id in tokens_of(next_masks(text, [])[1][0])
        text.accept([token_id])
    assert tokens_of(next_masks(text, [])[1][0]) == set(EOS)


def test_no_control_character_comes_into_json() -> None:
    text = text_grammar({"json_schema": {"type": "string", "pattern": "^[\\s\\S]*$"}})
    text.accept(tokenizer().encode(['"'])[0])
    allowed = [vocabulary().tokenizer.decode_bytes([token_id]) for token_id in tokens_of(next_masks(text, [])[1][0])]
    assert b"a" in allowed
    assert not [token for token in allowed if min(token, default=0x20) < 0x20]


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
    with pytest.raises(RequestError, match="no token of the model continues"):
        next_masks(text_grammar({"grammar": "root ::= root"}), [])

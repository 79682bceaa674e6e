"""The public test suite of JSON schema: what is compiled is held to, to the letter; the rest is refused."""

from __future__ import annotations

import json
from pathlib import Path

from grammar_texts import allows, compiled, compiled_within_text

from raypp.errors import RequestError
from raypp.grammar.compiled_grammar import LlguidanceGrammar

SUITE = Path(__file__).parents[2] / "data" / "json_schema_test_suite.json"
NUM_COMPILED, NUM_WITH_ALL = 311, 267
NUM_WITHIN_TEXT = 288
"""Schemas of the suite's 364; those of which every valid instance can be written, not only some."""


def test_within_text_no_invalid_instance_is_allowed_either() -> None:
    groups = [group for groups in json.loads(SUITE.read_text())["groups"].values() for group in groups]
    num_compiled = 0
    for group in groups:
        try:
            grammar = compiled_within_text(group["schema"])
        except RequestError:
            continue
        num_compiled += 1
        for value, is_valid in group["tests"]:
            assert is_valid or not allows(grammar, value), (group["description"], value)
    assert num_compiled == NUM_WITHIN_TEXT


def test_no_invalid_instance_is_allowed_of_any_schema_that_compiles() -> None:
    groups = [(name, group) for name, groups in json.loads(SUITE.read_text())["groups"].items() for group in groups]
    num_compiled = num_with_all = num_llguidance = 0
    for name, group in groups:
        try:
            grammar = compiled(group["schema"])
        except RequestError:
            continue
        num_compiled += 1
        num_llguidance += isinstance(grammar, LlguidanceGrammar)
        has_all = True
        for value, is_valid in group["tests"]:
            is_allowed = allows(grammar, value)
            assert is_valid or not is_allowed, (name, group["description"], value)
            has_all &= is_allowed or not is_valid
        num_with_all += has_all
    assert (len(groups), num_compiled, num_with_all) == (364, NUM_COMPILED, NUM_WITH_ALL)
    assert num_llguidance > 100

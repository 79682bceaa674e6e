"""The public test suite of JSON schema: what is compiled is held to, to the letter; the rest is refused."""

from __future__ import annotations

import json
from pathlib import Path

from grammar_texts import allows, compiled

from raypp.errors import RequestError

SUITE = Path(__file__).parents[2] / "data" / "json_schema_test_suite.json"
NUM_COMPILED, NUM_WITH_ALL = 263, 231
"""Schemas of the suite's 364; those of which every valid instance can be written, not only some."""


def test_no_invalid_instance_is_allowed_of_any_schema_that_compiles() -> None:
    groups = [(name, group) for name, groups in json.loads(SUITE.read_text())["groups"].items() for group in groups]
    num_compiled = num_with_all = 0
    for name, group in groups:
        try:
            matcher = compiled(group["schema"])
        except RequestError:
            continue
        num_compiled += 1
        has_all = True
        for value, is_valid in group["tests"]:
            is_allowed = allows(matcher, value)
            assert is_valid or not is_allowed, (name, group["description"], value)
            has_all &= is_allowed or not is_valid
        num_with_all += has_all
    assert (len(groups), num_compiled, num_with_all) == (364, NUM_COMPILED, NUM_WITH_ALL)

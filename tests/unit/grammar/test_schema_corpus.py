"""Real schemas: how many compile, and what their grammars allow held against `jsonschema` in both directions."""

from __future__ import annotations

import json
import random

from grammar_texts import allows_text, compiled, is_refused
from schema_texts import corpus, is_valid, mutated, validator_of, values, walk, written
from sizes import sized

NUM_SCHEMAS = 813
EVERY, NUM_COMPILED = sized((4, 185), (1, 745))


def test_nine_of_ten_real_schemas_compile_and_those_of_agents_all() -> None:
    assert len(corpus()) == NUM_SCHEMAS
    entries = corpus()[::EVERY]
    taken = [entry for entry in entries if not is_refused(entry["schema"])]
    assert len(taken) == NUM_COMPILED
    for source in ("kubernetes", "langchain", "mcp", "mcp-types", "openai-agents", "vega-lite", "zod"):
        assert sum(e["source"] == source for e in taken) == sum(e["source"] == source for e in entries), source


def test_what_a_grammar_allows_is_valid_and_what_is_valid_is_allowed() -> None:
    rng = random.Random(0)
    num_walks = num_values = num_invalid = 0
    for entry in rng.sample(corpus(), sized(70, 200)):
        schema = entry["schema"]
        if len(json.dumps(schema)) > 20_000 or is_refused(schema):
            continue
        matcher, validator = compiled(schema), validator_of(schema)
        for _ in range(2):
            if (text := walk(matcher, rng, 200)) is not None:
                assert is_valid(validator, json.loads(text)) is not False, (entry["name"], text)
                num_walks += 1
        for value in values(schema, rng, 4):
            if is_valid(validator, value):
                assert allows_text(matcher, written(value)), (entry["name"], value)
                num_values += 1
            other = mutated(value, rng)
            if is_valid(validator, other) is False:
                assert not allows_text(matcher, written(other)), (entry["name"], other)
                num_invalid += 1
    assert min(num_walks, num_values, num_invalid) > sized(60, 200)

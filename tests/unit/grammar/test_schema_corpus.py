"""Real schemas: how many llguidance compiles, and a sample of them held against `jsonschema` in both directions."""

from __future__ import annotations

import json
import random

from schema_texts import allows, corpus, is_valid, matcher_of, mutated, validator_of, values, walk, written

NUM_SCHEMAS, NUM_COMPILED = 813, 660


def test_four_of_five_real_schemas_compile_and_those_of_agents_nearly_all() -> None:
    entries = corpus()
    compiled = [entry for entry in entries if not matcher_of(entry["schema"]).is_error()]
    assert (len(entries), len(compiled)) == (NUM_SCHEMAS, NUM_COMPILED)
    for source in ("langchain", "mcp", "mcp-types", "openai-agents"):
        assert sum(e["source"] == source for e in compiled) == sum(e["source"] == source for e in entries)


def test_what_a_grammar_allows_is_valid_and_what_is_valid_is_allowed() -> None:
    rng = random.Random(0)
    num_walks = num_values = num_invalid = 0
    for entry in rng.sample(corpus(), 60):
        schema = entry["schema"]
        matcher = matcher_of(schema)
        if matcher.is_error() or len(json.dumps(schema)) > 20_000:
            continue
        validator = validator_of(schema)
        for _ in range(2):
            if (text := walk(matcher, rng, 200)) is not None:
                assert is_valid(validator, json.loads(text)) is not False, (entry["name"], text)
                num_walks += 1
        for value in values(schema, rng, 4):
            if is_valid(validator, value):
                assert allows(matcher, written(value)), (entry["name"], value)
                num_values += 1
            other = mutated(value, rng)
            if is_valid(validator, other) is False:
                assert not allows(matcher, written(other)), (entry["name"], other)
                num_invalid += 1
    assert min(num_walks, num_values, num_invalid) > 50

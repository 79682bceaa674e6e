"""What a grammar allows of JSON texts, byte by byte."""

from __future__ import annotations

import json
from functools import cache
from itertools import islice, permutations, product
from typing import Any

from raypp.grammar.compile import compile_constraint
from raypp.grammar.compiled_grammar import CompiledGrammar
from raypp.grammar.vocabulary import Vocabulary
from raypp.structured_outputs import source_of

END = 256
"""The token that ends a text; below it each byte is a token."""


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary.of_tokens([*(bytes([byte]) for byte in range(255)), b"", b"\xff<end>"], [END])


def compiled(schema: Any) -> CompiledGrammar:
    return compile_constraint(source_of({"json_schema": json.dumps(schema)}), vocabulary())


def compiled_within_text(schema: Any) -> CompiledGrammar:
    """Return the grammar of a schema within free text."""
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    return compile_constraint(source_of({"structural_tag": json.dumps(tag)}), vocabulary())


def allows_text(grammar: CompiledGrammar, text: str) -> bool:
    matcher = grammar.matcher()
    return all(map(matcher.accept_token, text.encode())) and matcher.accept_token(END)


def allows(grammar: CompiledGrammar, value: Any) -> bool:
    return any(allows_text(grammar, text) for text in texts_of(value))


def texts_of(value: Any) -> set[str]:
    """Return the ways to write a value that a grammar might allow: names in any order, with escapes and without."""
    return {*_written(value, is_ascii=True), *_written(value, is_ascii=False)}


def _written(value: Any, *, is_ascii: bool) -> list[str]:
    if isinstance(value, dict):
        pairs = [[f"{json.dumps(k, ensure_ascii=is_ascii)}: {text}" for text in _written(part, is_ascii=is_ascii)]
                 for k, part in value.items()]  # fmt: skip
        orders = permutations(pairs) if len(pairs) < 5 else [pairs]
        return ["{" + ", ".join(parts) + "}" for order in orders for parts in islice(product(*order), 20)]
    if isinstance(value, list):
        items = [_written(part, is_ascii=is_ascii) for part in value]
        return ["[" + ", ".join(parts) + "]" for parts in islice(product(*items), 20)]
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
    return [json.dumps(value, ensure_ascii=is_ascii), *([str(int(value))] if is_whole else [])]

"""What a grammar allows, byte by byte."""

from __future__ import annotations

import json
from functools import cache
from itertools import islice, permutations, product
from typing import Any

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from raypp.errors import RequestError
from raypp.grammar.compile import grammar_of, refused
from raypp.grammar.lark import reason_of
from raypp.structured_outputs import source_of

END, FIRST, SECOND = 256, 257, 258
"""The token that ends a text, and two special ones; below them each byte is a token."""


class _Bytes:
    bos_token_id = None
    eos_token_id = END
    special_token_ids = (END, FIRST, SECOND)
    # 255 begins the name of a special token.
    tokens = (*(bytes([byte]) for byte in range(255)), b"", b"\xff<end>", b"\xff<first>", b"\xff<second>")

    def __call__(self, text: bytes) -> list[int]:
        return []


@cache
def byte_tokens() -> LLTokenizer:
    """Return a vocabulary of bytes, an end and special tokens."""
    return LLTokenizer(TokenizerWrapper(_Bytes()), eos_token=[END], slices=[])


def matcher_of(constraint: dict[str, Any], tokens: LLTokenizer | None = None) -> LLMatcher:
    """Return what follows a text.

    Raises:
        RequestError: the constraint cannot be compiled.
    """
    lark = grammar_of(source_of(constraint))
    grammar = LLMatcher.grammar_from_lark(f'{lark}\n%llguidance {{"no_forcing": true}}')
    matcher = LLMatcher(tokens or byte_tokens(), grammar, log_level=0)
    if matcher.is_error():
        [kind] = constraint
        raise refused(kind, reason_of(matcher.get_error()))
    return matcher


def compiled(schema: Any) -> LLMatcher:
    """Return what follows the JSON of a schema."""
    return matcher_of({"json_schema": json.dumps(schema)})


def compiled_within_text(schema: Any) -> LLMatcher:
    """Return what follows the same as a part of a structural tag."""
    return matcher_of(tag_of({"type": "json_schema", "json_schema": schema}))


def tag_of(form: Any) -> dict[str, Any]:
    """Return the constraint of a structural tag."""
    return {"structural_tag": json.dumps({"type": "structural_tag", "format": form})}


def is_refused(schema: Any) -> bool:
    """Return whether a schema cannot be compiled."""
    try:
        compiled(schema)
    except RequestError:
        return True
    return False


def allows_tokens(matcher: LLMatcher, *parts: str | int) -> bool:
    """Return whether a text, with tokens in between, is allowed, all of it. The matcher is as before."""
    ids = [token for part in parts for token in ([part] if isinstance(part, int) else part.encode())]
    follower = matcher.deep_copy()
    return follower.try_consume_tokens(ids) == len(ids) and follower.is_accepting()


def allows_text(matcher: LLMatcher, text: str) -> bool:
    """Return whether a text is allowed, all of it."""
    return allows_tokens(matcher, text)


def allows(matcher: LLMatcher, value: Any) -> bool:
    """Return whether a value can be written."""
    return any(allows_text(matcher, text) for text in texts_of(value))


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

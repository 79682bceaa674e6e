"""From a constraint to a grammar in llguidance's form of Lark, and to a compiled one."""

from __future__ import annotations

import json
import re
from typing import Any

from raypp.errors import RequestError, page
from raypp.grammar.compiled_grammar import CompiledGrammar, CompiledGrammarError
from raypp.grammar.lark import LARK_MARK, json_rule, lark_of_grammar, literal, one_of, regex
from raypp.grammar.structural_tag import lark_of_structural_tag
from raypp.grammar.vocabulary import Vocabulary

_OBJECT = {"type": "object", "additionalProperties": True}


def compile_constraint(source: str, vocabulary: Vocabulary) -> CompiledGrammar:
    """Return the grammar of a constraint, ready to be followed.

    Args:
        source: `structured_outputs.source_of`.
        vocabulary: The model's.

    Raises:
        RequestError: why it cannot be.
    """
    try:
        return CompiledGrammar(grammar_of(source), vocabulary)
    except CompiledGrammarError as error:
        raise refused(kind_and_value(source)[0], str(error)) from error


def grammar_of(source: str) -> str:
    """Return the grammar of a constraint in llguidance's form of Lark.

    JSON is written in one line as Python's json.dumps does: where a grammar allows white space, a model may write
    nothing else for ever.

    Args:
        source: `structured_outputs.source_of`.

    Raises:
        RequestError: a part that could not be enforced.
    """
    kind, value = kind_and_value(source)
    try:
        grammar = _lark(kind, value)
        if half := re.search("[\ud800-\udfff]", grammar):
            raise ValueError(f"the character \\u{ord(half[0]):x}, which is half of one")
        return grammar
    except RecursionError:
        raise refused(kind, "it is nested too deeply") from None
    except (ValueError, OverflowError) as error:  # the latter of the number of a character
        raise refused(kind, str(error)) from None


def _lark(kind: str, value: Any) -> str:
    match kind:
        case "json_schema":
            start = f"start: {json_rule(json.loads(value))}"
        case "json_object":
            start = f"start: {json_rule(_OBJECT)}"
        case "regex":
            start = f"start: {regex(value)}"
        case "choice":
            start = f"start: TEXT\nTEXT: {one_of(map(literal, value))}"
        case "grammar":
            start = lark_of_grammar(value)
        case _:
            start = lark_of_structural_tag(json.loads(value))
    # Without one more line in front of a user's Lark: errors say in which of its lines they are.
    return f"{start}\n" if start.lstrip().startswith(LARK_MARK) else f"{LARK_MARK} {{}}\n{start}\n"


def kind_and_value(source: str) -> tuple[str, Any]:
    """Return what a constraint is and what it says."""
    [(kind, value)] = json.loads(source).items()
    return kind, value


def refused(kind: str, reason: str) -> RequestError:
    """Return the error of a constraint that cannot be compiled."""
    return RequestError(
        f"structured_outputs: this {kind} cannot be compiled",
        got=reason[:300],
        expected="one that a grammar can follow",
        hint=f"{page('structured_outputs')} says what is supported",
        param="structured_outputs",
    )

"""From a constraint to a compiled grammar. It may take long: see `raypp.grammar.grammar_threads`."""

from __future__ import annotations

import json
from typing import Any

from raypp.errors import RequestError, page
from raypp.grammar.compiled_grammar import LARK_MARK, CompiledGrammar, lark_of_schema
from raypp.grammar.schema_writer import rewritten
from raypp.grammar.structural_tag import lark_of_structural_tag
from raypp.grammar.vocabulary import Vocabulary


def compile_constraint(source: str, vocabulary: Vocabulary) -> CompiledGrammar:
    """Return the grammar of a constraint.

    JSON is written in one line as Python's json.dumps does: where a grammar allows white space, a model may write
    nothing else for ever.

    Args:
        source: `structured_outputs.source_of`.
        vocabulary: The model's.

    Raises:
        RequestError: why it cannot be.
    """
    kind, value = kind_and_value(source)
    try:
        return CompiledGrammar(_lark(kind, value, vocabulary), vocabulary)
    except RequestError:
        raise
    except RecursionError:
        raise refused(kind, "it is nested too deeply") from None
    except Exception as error:
        raise refused(kind, " ".join(str(error).split())[:300] or type(error).__name__) from error


def _lark(kind: str, value: Any, vocabulary: Vocabulary) -> str:
    """Return a constraint in llguidance's form of Lark."""
    match kind:
        case "json_schema":
            return lark_of_schema(rewritten(json.loads(value)))
        case "json_object":
            return lark_of_schema({"type": "object"})
        case "regex":
            return f"{LARK_MARK} {{}}\nstart: /{value.replace('/', chr(92) + '/')}/"
        case "choice":
            return f"{LARK_MARK} {{}}\nstart: " + " | ".join(map(json.dumps, value))
        case "grammar":
            from llguidance.gbnf_to_lark import any_to_lark

            return value if value.lstrip().startswith(LARK_MARK) else f"{LARK_MARK} {{}}\n{any_to_lark(value)}"
        case _:
            return lark_of_structural_tag(json.loads(value), vocabulary.token_id)


def kind_and_value(source: str) -> tuple[str, Any]:
    """Return what a constraint is and what it says."""
    [(kind, value)] = json.loads(source).items()
    return kind, value


def refused(kind: str, reason: str) -> RequestError:
    """Return the error of a constraint that cannot be compiled."""
    return RequestError(
        f"structured_outputs: this {kind} cannot be compiled",
        got=reason,
        expected="one that a grammar can follow",
        hint=f"{page('structured_outputs')} says what is supported",
        param="structured_outputs",
    )

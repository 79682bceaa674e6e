"""From a constraint to a compiled grammar. It may take long: see `raypp.grammar.compilers`."""

from __future__ import annotations

import json
import re
from typing import Any

from raypp.errors import RequestError, page
from raypp.grammar.compiled_grammar import (
    LARK_MARK,
    CompiledGrammar,
    LlguidanceGrammar,
    XgrammarGrammar,
    lark_of_schema,
)
from raypp.grammar.schema_check import enforceable
from raypp.grammar.schema_writer import enforceable_by_xgrammar, rewritten
from raypp.grammar.vocabulary import Vocabulary

_OBJECT = '{"type": "object", "additionalProperties": true}'


def compile_constraint(source: str, vocabulary: Vocabulary, num_threads: int) -> CompiledGrammar:
    """Return the grammar of a constraint: llguidance's of Lark and of schemas beyond xgrammar, else xgrammar's.

    JSON is written in one line as Python's json.dumps does: where a grammar allows white space, a model may write
    nothing else for ever.

    Args:
        source: `structured_outputs.source_of`.
        vocabulary: The model's.
        num_threads: To compile with.

    Raises:
        RequestError: why it cannot be.
    """
    kind, value = kind_and_value(source)
    try:
        if kind == "json_schema":
            schema = json.loads(value)
            try:
                return XgrammarGrammar(_by_xgrammar(kind, enforceable(schema), vocabulary, num_threads))
            except (RequestError, RuntimeError, TypeError, ValueError, AttributeError, LookupError):
                return LlguidanceGrammar(lark_of_schema(rewritten(schema)), vocabulary)
        if kind == "grammar" and value.lstrip().startswith(LARK_MARK):
            return LlguidanceGrammar(value, vocabulary)
        return XgrammarGrammar(_by_xgrammar(kind, value, vocabulary, num_threads))
    except RequestError:
        raise
    except RecursionError:
        raise refused(kind, "it is nested too deeply") from None
    except Exception as error:  # xgrammar's are RuntimeErrors with a line of C++ in front
        raise refused(kind, _reason(error)) from error


def _by_xgrammar(kind: str, value: Any, vocabulary: Vocabulary, num_threads: int) -> Any:
    """Return xgrammar's `CompiledGrammar`."""
    import xgrammar

    tokens = vocabulary.of(kind, value)
    compiler = xgrammar.GrammarCompiler(tokens, max_threads=num_threads, cache_enabled=False)
    match kind:
        case "json_schema":
            return compiler.compile_json_schema(json.dumps(value), any_whitespace=False)
        case "json_object":
            return compiler.compile_json_schema(_OBJECT, any_whitespace=False, strict_mode=False)
        case "regex":
            return compiler.compile_regex(value)
        case "choice":
            return compiler.compile_grammar("root ::= " + " | ".join(map(_ebnf_text, value)))
        case "grammar":
            return compiler.compile_grammar(value)
        case _:
            return compiler.compile_structural_tag(json.dumps(_with_grammars(json.loads(value))))


def _with_grammars(form: Any) -> Any:
    """Return a structural tag with the grammars of its schemas: xgrammar's own allow any amount of white space.

    Schemas with another style than JSON keep it, and xgrammar's white space.
    """
    import xgrammar

    if isinstance(form, list):
        return [_with_grammars(part) for part in form]
    if not isinstance(form, dict):
        return form
    if form.get("type") == "json_schema" and "json_schema" in form:
        if form.get("style", "json") != "json":
            return {**form, "json_schema": enforceable(form["json_schema"])}
        schema = json.dumps(enforceable_by_xgrammar(form["json_schema"]))
        printed = str(xgrammar.Grammar.from_json_schema(schema, any_whitespace=False))
        # It prints U+00E9 as \xe9, and reads as many digits behind \x as there are; behind \u it reads four.
        return {"type": "grammar", "grammar": re.sub(r"\\(\\|x)", lambda m: m[0].replace("x", "u00"), printed)}
    return {name: _with_grammars(part) for name, part in form.items()}


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


def _ebnf_text(text: str) -> str:
    """Return a text as EBNF's literal: every character by its code point, so that none means anything."""
    return '"' + "".join(c if c.isascii() and c.isalnum() else f"\\U{ord(c):08x}" for c in text) + '"'


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    place, found, reason = text.partition(".cc:")
    return (reason.partition(": ")[2] if found and "/cpp/" in place else text)[:300] or type(error).__name__

"""What is compiled, and for whom."""

from __future__ import annotations

from typing import Any

from raypp.errors import RequestError
from raypp.grammar.grammar_messages import CompileGrammar, GrammarReply, NotCompiled, OpenGrammar, Unknown, key_of
from raypp.grammar.texts import Texts


def test_a_constraint_is_compiled_once_and_a_text_without_is_told() -> None:
    compiled: list[str] = []
    said: list[GrammarReply] = []
    vocabulary: Any = None  # nothing gets as far
    texts = Texts(vocabulary, 100, compiled.append, said.append, threads=False)
    for _ in range(3):
        texts.handle(CompileGrammar("source"))
    assert compiled == ["source"]
    texts.handle(OpenGrammar(5, key_of("source")))
    assert said == [Unknown(5)]
    error = RequestError("no")
    texts.take_compiled("source", error)
    assert said[1:] == [NotCompiled(key_of("source"), error)]
    texts.handle(CompileGrammar("source"))
    assert compiled == ["source", "source"]

"""What is compiled, and for whom."""

from __future__ import annotations

from typing import Any

from raypp.grammar.messages import CloseGrammar, OpenGrammar
from raypp.grammar.texts import Texts


def test_a_constraint_is_compiled_once_though_its_texts_come_and_go() -> None:
    compiled: list[str] = []
    vocabulary: Any = None  # nothing gets as far
    texts = Texts(vocabulary, 100, compiled.append, lambda reply: None, threads=False)
    for number in range(3):
        texts.handle(OpenGrammar(number, "source"))
        if number < 2:
            texts.handle(CloseGrammar(number))
    assert compiled == ["source"]

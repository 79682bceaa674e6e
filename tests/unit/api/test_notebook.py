"""A cell that starts an engine again replaces it."""

from __future__ import annotations

import pytest

from raypp.api.launch import close_replaced_engines, engines_replaced_by


class Engine:
    num_closed = 0

    def close_when_replaced(self) -> None:
        self.num_closed += 1


@pytest.mark.parametrize(
    ("source", "is_replaced"),
    [
        ("llm = LLM('tiny')", True),
        ("llm: LLM = LLM('tiny')", True),
        ("llm = await AsyncLLM.create('tiny')", True),
        ("with LLM('tiny') as llm:\n    llm.generate('a')", True),
        ("if True:\n    (llm, x) = LLM('tiny'), 1", True),
        ("print(llm := LLM('tiny'))", True),
        ("other = LLM('tiny')", False),
        ("LLM('tiny').generate(llm)", False),
        ("def start():\n    llm = LLM('tiny')\n    return llm\nother = start()", False),
        ("not python at all", False),
    ],
)
def test_what_a_cell_replaces(source: str, is_replaced: bool) -> None:
    engine = Engine()
    namespace = {"llm": engine, "same": engine, "x": 3, "LLM": Engine}
    assert engines_replaced_by(source, namespace) == ([engine] if is_replaced else [])


def test_outside_of_a_notebook_nothing_is_closed() -> None:
    close_replaced_engines()

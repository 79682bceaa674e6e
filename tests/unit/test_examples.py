"""The examples run as they are. Engines are threads of this process, and all that run `tiny` share the server's.

tests/ray runs the examples that are about Ray.
"""

from __future__ import annotations

import ast
import io
import json
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from running_app import RunningApp, running_app

from raypp.api.launch import EngineHandle
from raypp.config.engine_config import EngineConfig
from raypp.testing import launch_in_threads

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))
MAX_LINES = 65

Run = Callable[..., str]


class Shared:
    """An `EngineHandle` of an engine that goes on when an example closes it: another need not start."""

    def __init__(self, handle: EngineHandle) -> None:
        self._handle = handle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def app() -> Iterator[RunningApp]:
    with running_app(max_model_len=512) as app:
        yield app


@pytest.fixture
def run(app: RunningApp, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs an example, as its docstring says, and returns what it prints."""
    shared = Shared(app.context.llm._engine.handle)

    def launch(config: EngineConfig, *, stage_factory: object = None) -> Any:
        return shared if config.model.model == "tiny" else launch_in_threads(config)

    def run(name: str, *args: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *args])
        runpy.run_path(str(FOLDER / name), run_name="__main__")
        return capsys.readouterr().out

    monkeypatch.setattr("raypp.actors.engine_actors.launch_engine", launch)
    monkeypatch.setenv("OPENAI_BASE_URL", f"{app.url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    return run


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_says_how_to_run_it(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_LINES
    assert f"python examples/{path.name}" in (ast.get_docstring(ast.parse(text)) or "")


def test_the_readme_lists_every_example_once() -> None:
    listed = re.findall(r"^\| \[([\w.]+)\]\(\1\) \|", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == [path.name for path in EXAMPLES]


def test_chat_client(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nand now?\n\n"))
    assert re.findall(r"^(?:you: )?tiny: ", run("chat_client.py"), re.MULTILINE) == ["you: tiny: "] * 2


def test_tool_calls(run: Run) -> None:
    call = re.match(r"get_weather\((\{.*\})\) -> (Vienna|Bern): sun for (\d) days\n", run("tool_calls.py"))
    assert call is not None
    assert json.loads(call[1]) == {"city": call[2], "days": int(call[3])}


def test_streaming(run: Run) -> None:
    lines = run("streaming.py").splitlines()
    assert len(lines) > 3 * 8
    assert sum(line.endswith("ends: length") for line in lines) == 3


def test_json_output(run: Run) -> None:
    assert run("json_output.py").count(" as JSON: ' -> Person(name='") == 2


def test_images(run: Run) -> None:
    answer = run("images.py")
    assert "red circle" in answer
    assert "blue square" in answer


def test_batch(run: Run, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        run("batch.py", str(tmp_path))
    assert ended.value.code == 0
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert {answer["custom_id"] for answer in answers} == {"a chat", *(f"function {i}" for i in range(20))}


def test_own_link(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is the one of the links that raypp brings."""
    text = run("own_link.py")
    monkeypatch.setattr("raypp.testing.launch_in_threads", lambda config, open_edge, **rest: launch_in_threads(config))
    assert run("own_link.py") == text
    assert len(text) > 20

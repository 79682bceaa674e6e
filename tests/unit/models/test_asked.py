"""What a program says of a model is asked for once."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypp.errors import ModelLoadError
from raypp.models.asked import asked, cache_folder

PROGRAM = """
import json, pathlib, sys
count = pathlib.Path(sys.argv[1], "count")
count.write_text(count.read_text() + "x" if count.exists() else "x")
print("a library says something")
print(json.dumps({"arguments": sys.argv[2:], "times": len(count.read_text())}))
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "asked_program.py").write_text(PROGRAM)
    (tmp_path / "asked_in_vain.py").write_text("raise SystemExit('no such thing')")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    return tmp_path / "model"


def test_it_is_asked_once_per_model_and_arguments(model: Path) -> None:
    assert asked("asked_program", model, "2,2") == {"arguments": ["2,2"], "times": 1}
    assert asked("asked_program", model, "2,2") == {"arguments": ["2,2"], "times": 1}
    assert asked("asked_program", model, "1,3") == {"arguments": ["1,3"], "times": 2}
    (model / "config.json").write_text('{"a": 1}')
    assert asked("asked_program", model, "2,2")["times"] == 3
    for kept in (cache_folder() / "models").iterdir():
        kept.write_text("{")  # a disk that was full
    assert asked("asked_program", model, "2,2")["times"] == 4


def test_without_a_cache_it_is_asked_each_time(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(model / "config.json"))
    assert [asked("asked_program", model)["times"] for _ in range(2)] == [1, 2]


def test_no_answer_is_an_error_and_not_kept(model: Path) -> None:
    with pytest.raises(ModelLoadError, match="no such thing"):
        asked("asked_in_vain", model)
    assert not (cache_folder() / "models").exists()

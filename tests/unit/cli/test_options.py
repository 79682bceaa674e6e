"""Options are taken as they are spelled."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from raypp.cli.engine_options import add_engine_options, engine_config
from raypp.cli.main import main
from raypp.config.sections import ModelSection
from raypp.errors import ConfigError


@pytest.mark.parametrize("argv", [["info", "--mod", "tiny"], ["info", "--model", "tiny", "--num-st", "2"], ["--vers"]])
def test_an_abbreviated_option_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert argv[-1 if len(argv) == 1 else -2] in capsys.readouterr().err


def test_a_chat_template_is_read_where_the_command_runs(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_engine_options(parser)

    def model(*argv: str) -> ModelSection:
        return engine_config(parser.parse_args(["--model", "tiny", *argv])).model

    (tmp_path / "mine.jinja").write_text("{{ messages }}")
    for given in (str(tmp_path / "mine.jinja"), "{{ messages }}"):
        assert model("--chat-template", given).chat_template == "{{ messages }}"
    assert model("--revision", "v1").revision == "v1"
    with pytest.raises(ConfigError, match="cannot be read"):
        model("--chat-template", str(tmp_path / "other.jinja"))


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["serve", "--modle", "x"], "raypp serve: error: unknown option --modle; did you mean --model?"),
        (["batch", "--inptu=x", "--output", "y"], "unknown option --inptu; did you mean --input?"),
        (["generate", "-model", "x"], "unknown option -model; did you mean --model?"),
        (["info", "--wxyz"], "unknown option --wxyz\n"),
    ],
)
def test_an_unknown_option_is_answered_with_the_nearest(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err

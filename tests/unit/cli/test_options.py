"""Options are taken as they are spelled."""

from __future__ import annotations

import pytest

from raypp.cli.main import main


@pytest.mark.parametrize("argv", [["info", "--mod", "tiny"], ["info", "--model", "tiny", "--num-st", "2"], ["--vers"]])
def test_an_abbreviated_option_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert argv[-1 if len(argv) == 1 else -2] in capsys.readouterr().err


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

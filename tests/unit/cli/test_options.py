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

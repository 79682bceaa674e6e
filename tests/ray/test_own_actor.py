"""The example of an engine in a user's own actor."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.ray

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_actor.py"


@pytest.mark.usefixtures("local_ray")  # which checks that the engine's processes are gone
def test_an_engine_in_an_own_actor(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert capsys.readouterr().out.count("' -> '") == 8

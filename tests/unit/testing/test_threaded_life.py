"""Engines in threads leave nothing open, however they end."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from raypp import LLM
from raypp.testing import launch_in_threads


def test_a_stage_that_cannot_be_made_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def factory(*_: object, **__: object) -> None:
        raise ZeroDivisionError("while it is made")

    with pytest.raises(ZeroDivisionError):
        LLM("tiny", num_stages=2, launch=launch_in_threads, stage_factory=factory)
    assert not list(tmp_path.iterdir())  # the folder goes once the sockets in it are closed

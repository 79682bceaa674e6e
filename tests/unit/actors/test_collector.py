"""The collector stands still while modules are imported, and goes on as it did before, whatever comes of them."""

from __future__ import annotations

import gc
import sys

import pytest

import raypp.stage.build_stage
from raypp.actors.processes import collector_paused
from raypp.actors.stage_actor import StageActor


def test_it_goes_on_afterwards() -> None:
    with collector_paused():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyError), collector_paused():
        raise KeyError
    assert gc.isenabled()


def test_one_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_stage_imports_its_modules_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Finder:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name == "raypp.stage.build_stage":
                seen.append(gc.isenabled())

    monkeypatch.delattr(raypp.stage, "build_stage")
    monkeypatch.delitem(sys.modules, "raypp.stage.build_stage")
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    stage = StageActor.__new__(StageActor)
    stage._share = None
    with pytest.raises(AttributeError, match="_spec"):  # what it is to load comes next
        stage.prepare("127.0.0.1")
    assert seen == [False]

"""The collector stands still while modules are imported, and goes on as it did before, whatever comes of them."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from raypp.actors.collector import collector_paused


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


def test_a_stage_imports_torch_without_it() -> None:
    script = """if True:
        import gc, sys
        from types import SimpleNamespace
        from raypp.actors.stage_actor import StageActor
        assert "torch" not in sys.modules
        full = []
        gc.callbacks.append(lambda phase, info: full.append(phase) if info["generation"] == 2 else None)
        stage = StageActor.__new__(StageActor)
        stage._share = stage._factory = None
        stage._spec = SimpleNamespace(num_threads=1, device="cpu")
        try:
            stage.prepare("127.0.0.1")
        except AttributeError:  # of a specification that says no more
            pass
        assert "torch" in sys.modules
        assert not full, len(full)
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

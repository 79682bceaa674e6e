"""A stage's actor is called from threads of Ray's choice, each of which begins with the first GPU as its own."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raypp.actors import stage_actor
from raypp.actors.stage_actor import StageActor
from raypp.config.engine_config import EngineConfig
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.stage import build_stage

WAIT_S = 20.0


class StageIsBuiltError(Exception):
    """Ends a call where the stage would be built."""


@pytest.mark.parametrize("call", ["prepare", "connect"])
def test_whichever_thread_builds_has_the_stages_gpu(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    own = threading.local()

    def built(*args: Any, **kwargs: Any) -> None:
        assert getattr(own, "device", "cuda:0") == "cuda:1"
        raise StageIsBuiltError

    monkeypatch.setattr(stage_actor, "log_to_stderr", lambda: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(own, "device", device))
    monkeypatch.setattr(build_stage, "build_stage_model", built)
    monkeypatch.setattr(build_stage, "build_stage", built)
    monkeypatch.setattr(stage_actor, "local_device", lambda device: "cuda:1")
    plan = plan_engine(EngineConfig.from_flat("tiny", num_stages=1), Hardware(4))
    actor = StageActor(plan.stage_spec(0), plan.model, None)
    if call == "connect":
        monkeypatch.setattr(actor, "_model", SimpleNamespace())
    addresses = dict[str, Any](own_host="", rendezvous=None, plan_address="", result_address="", server_key=None)
    arguments = {"prepare": {"own_host": "127.0.0.1"}, "connect": {"timeout_s": WAIT_S, **addresses}}[call]
    with ThreadPoolExecutor(1) as thread, pytest.raises(StageIsBuiltError):
        thread.submit(getattr(actor, call), **arguments).result(WAIT_S)

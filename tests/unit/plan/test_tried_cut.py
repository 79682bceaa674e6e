"""A model of transformers' modules starts only if a small copy of it gave the right tokens in the same stages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from raypp.config.engine_config import EngineConfig
from raypp.errors import ModelLoadError
from raypp.models.config import MeasuredLayer
from raypp.plan import tried_cut
from raypp.plan.engine_plan import EnginePlan, plan_engine
from raypp.plan.hardware import Hardware
from raypp.plan.tried_cut import require_tried

GOOD = {"whole": None, "cut": None, "members": None}


@pytest.fixture
def plan() -> EnginePlan:
    plan = plan_engine(EngineConfig.from_flat("tiny", num_stages=2), Hardware(1))
    measured = (MeasuredLayer(num_parameters=1, mlp_width=1, num_outputs=None),) * plan.model.num_layers
    return replace(plan, model=replace(plan.model, architecture="transformers:XForCausalLM", measured=measured))


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"error": "ValueError: odd"}, ["XForCausalLM", "ValueError: odd", "small copy"]),
        (GOOD | {"whole": "token 3 is 5"}, ["XForCausalLM", "attention", "token 3 is 5"]),
        (GOOD | {"members": "token 3 is 5"}, ["members of a stage", "token 3 is 5", "tensor_parallel_size=1"]),
        (GOOD | {"cut": "token 3 is 5"}, ["4,2 layers per stage", "token 3 is 5", "num_stages=1"]),
    ],
)
def test_other_tokens_are_refused(
    monkeypatch: pytest.MonkeyPatch, plan: EnginePlan, found: dict[str, Any], words: list[str]
) -> None:
    monkeypatch.setattr(tried_cut, "asked", lambda *_, **__: found)
    with pytest.raises(ModelLoadError) as raised:
        require_tried(plan)
    assert all(word in str(raised.value) for word in words)


def test_what_gives_the_same_tokens_starts(monkeypatch: pytest.MonkeyPatch, plan: EnginePlan) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(tried_cut, "asked", lambda *of, **_: asked.append(of) or GOOD)
    require_tried(plan)
    require_tried(replace(plan, model=replace(plan.model, measured=None)))  # raypp's own layers
    require_tried(replace(plan, model=replace(plan.model, num_members=4)))
    assert [of[2:] for of in asked] == [("4,2",), ("4,2", "--members")]

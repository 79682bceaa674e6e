"""Debug mode catches what replays the past: an operation that should be a break point, a table that has moved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_tape import OpTapes, tape_graphs

from raypp.config.engine_config import EngineConfig
from raypp.errors import GraphMismatchError
from raypp.graphs.debug import Watched
from raypp.graphs.graph_manager import CudaGraphManager
from raypp.ops.break_point import break_point
from raypp.ops.cpu import torch_kernels
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.testing import LocalEngine, build_local_pipeline
from raypp.types import SamplingParams

CPU = torch.device("cpu")
PROMPTS = [[7, 80, 99, 3, 12], [5] * 11, [9, 8, 7]]


def _engine(mode: str, debug_every: int, **more: Any) -> LocalEngine:
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "block_size": 4, "max_model_len": 64}
    config = EngineConfig.from_flat("tiny", mode=mode, debug_every=debug_every, **settings, **more)
    plan = plan_engine(config, Hardware(1))
    return LocalEngine(plan, pipeline=build_local_pipeline(plan, make_graphs=tape_graphs))


def _generate(engine: LocalEngine) -> list[list[int]]:
    return engine.generate(PROMPTS, SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))


@pytest.mark.parametrize("mode", ["full", "piecewise"])
def test_attention_that_is_no_break_point(monkeypatch, mode):
    """Unnoticed without debug mode, it attends to what it was recorded with."""
    expected = _generate(_engine(mode, debug_every=1))
    monkeypatch.setattr(torch_kernels, "_attend", torch_kernels._attend.__wrapped__)
    assert _generate(_engine(mode, debug_every=0)) != expected
    with pytest.raises(GraphMismatchError, match="does not do what its program does") as caught:
        _generate(_engine(mode, debug_every=1))
    assert "break_point" in str(caught.value.hint)


def test_products_that_are_added_in_place(monkeypatch):
    """As a GPU's library adds them: a head's layer then overwrites what it is told of a step."""

    def add_linear(self, weight, bias=None, norm=None):
        assert norm is None
        linear = self.linear(weight, bias)
        return lambda x, residual: residual.add_(linear(x))

    monkeypatch.setattr(torch_kernels.TorchKernels, "add_linear", add_linear)
    speculative = {"method": "eagle3", "model": "tiny-eagle3", "num_speculative_tokens": 2}
    engine = _engine("full", debug_every=1, speculative=speculative)
    assert _generate(engine)
    assert engine.stats().num_draft_tokens > 0


class Doubler:
    """A program with a buffer in and a buffer out, and a factor that the host knows."""

    def __init__(self) -> None:
        self.factor = 2
        self.input = torch.zeros(4, 3)
        self.output = torch.zeros(4, 3)
        self.watched = Watched(
            reads=(self,),
            changes=({"output": self.output},),
            yields=lambda result: {"output": self.output},
        )

    def with_constant(self) -> None:
        self.output.add_(self.input * self.factor)

    def with_break_point(self) -> None:
        scaled = torch.empty_like(self.input)
        self.scale(self.input, scaled)
        self.output.add_(scaled)

    @break_point
    def scale(self, x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x * self.factor)

    @break_point
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor

    def with_result(self) -> None:
        self.output.add_(self.scaled(self.input))


@pytest.mark.parametrize("name", ["with_break_point", "with_result"])
def test_break_points_see_what_the_host_knows_now(name):
    doubler, graphs = Doubler(), CudaGraphManager(OpTapes(), debug_every=1)
    graphs.record("test", "key", getattr(doubler, name), breakable=True, watched=doubler.watched)
    doubler.output.zero_()
    for factor in (2, 5):
        doubler.factor = factor
        doubler.input.fill_(factor)
        graphs.run("key")
    assert (doubler.output == 4 + 25).all()
    assert graphs.num_compared == 2


def test_constants_are_replayed_and_caught():
    doubler = Doubler()
    plain, checked = (CudaGraphManager(OpTapes(), debug_every=every) for every in (0, 2))
    for graphs in (plain, checked):
        graphs.record("test", "key", doubler.with_constant, watched=doubler.watched)
    doubler.input.fill_(1)
    doubler.output.zero_()
    doubler.factor = 7
    plain.run("key")
    assert (doubler.output == 2).all()
    with pytest.raises(GraphMismatchError, match="output differs in 4 of 4 rows"):
        checked.run("key")
    checked.run("key")  # one of two is compared


def test_memory_that_moved():
    doubler, graphs = Doubler(), CudaGraphManager(OpTapes(), debug_every=1000)
    graphs.record("test", "key", doubler.with_constant, watched=doubler.watched)
    graphs.run("key")
    doubler.input = doubler.input.clone()
    with pytest.raises(GraphMismatchError, match="input at another address"):
        graphs.run("key")


def test_not_a_number_equals_itself():
    doubler, graphs = Doubler(), CudaGraphManager(OpTapes(), debug_every=1)
    graphs.record("test", "key", doubler.with_constant, watched=doubler.watched)
    doubler.input.fill_(torch.nan)
    graphs.run("key")
    assert doubler.output.isnan().all()


def test_an_error_while_recording_leaves_nothing():
    doubler, graphs = Doubler(), CudaGraphManager(OpTapes())
    calls = iter((None, ValueError("the second time")))

    @break_point
    def fails() -> None:
        if (error := next(calls)) is not None:
            raise error

    with pytest.raises(ValueError, match="the second time"):
        graphs.record("test", "broken", fails, breakable=True)
    assert "broken" not in graphs
    graphs.record("test", "key", doubler.with_break_point, breakable=True)
    doubler.output.zero_()
    doubler.input.fill_(1)
    graphs.run("key")
    assert (doubler.output == 2).all()

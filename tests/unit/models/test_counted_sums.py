"""The cost model counts the sums that the members of a stage make in a layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import make_checkpoint
from shrunken_models import make_shrunken
from test_member_sizes import CASES, SIZES

from raypp.config.engine_config import EngineConfig
from raypp.models import config as config_module
from raypp.models.config import load_model_config
from raypp.models.member_sizes import of_one_member
from raypp.models.sizes import layer_sizes
from raypp.models.transformers_probe import answer
from raypp.ops.cpu.torch_kernels import TorchKernels
from raypp.plan.cost_model import estimated_costs, layer_sums_ms
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.testing import LocalEngine
from raypp.types import SamplingParams

_SHAPES = Path(__file__).parents[3] / "benchmarks" / "models"


def _counted(path: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[Counter[int], Counter[int]]:
    """Return how many sums of which width both members make in some steps, and the plan's of one step."""
    made, member_sum = Counter[int](), TorchKernels.member_sum

    def noted(self: TorchKernels, members: Any) -> Callable[..., torch.Tensor]:
        of_members = member_sum(self, members)

        def sum_(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            made[x.shape[-1]] += 1
            return of_members(x, residual)

        return sum_

    monkeypatch.setattr(TorchKernels, "member_sum", noted)
    sizes = {"max_model_len": 32, "max_num_seqs": 2, "num_kv_blocks": 20, "stage_num_threads": 1}
    plan = plan_engine(
        EngineConfig.from_flat(str(path), device="cpu", tensor_parallel_size=2, **sizes, **settings), Hardware(1)
    )
    engine = LocalEngine(plan)
    made.clear()  # what was tried at the start
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))
    widths = [width for size in layer_sizes(plan.model, 4) for width in size.summed]
    return made, Counter(width if width == plan.model.hidden_size else width // 2 for width in widths)


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        ("dense", {}),
        ("experts", {"enable_expert_parallel": True}),
        ("some dense layers", {}),
        ("an MLP beside experts", {}),
        ("shared experts", {}),
        ("a norm of all heads", {}),
        ("states and experts", {}),
    ],
)
def test_each_sum_of_a_layer_is_counted(case, settings, tmp_path, monkeypatch):
    family, seed, changes = CASES[case]
    path = make_checkpoint(family, seed, tmp_path, **{**SIZES, **changes})
    made, planned = _counted(path, monkeypatch, load_format="dummy", **settings)
    assert made
    num_times = made.total() // planned.total()
    assert made == Counter({width: number * num_times for width, number in planned.items()})


@pytest.mark.parametrize(("model_type", "num_sums"), [("qwen3_moe", 2), ("deepseek_v3", 3), ("olmo2", 1)])
def test_sums_of_transformers_modules_are_those_that_are_cut(model_type, num_sums, tmp_path, monkeypatch):
    monkeypatch.setattr(config_module, "asked", lambda _, path, *given, **options: answer(path, *given, **options))
    path = make_shrunken(model_type, tmp_path)
    model = of_one_member(load_model_config(path, impl="transformers"), 2, path=path)
    assert len(layer_sizes(model, 2)[-1].summed) == num_sums


def test_an_mlp_beside_experts_makes_three_sums():
    model = of_one_member(load_model_config(_SHAPES / "gemma-4-26b-a4b"), 2)
    size, num_tokens = layer_sizes(model, 2)[0], 32
    assert size.summed == (model.hidden_size,) * 3
    sums_ms = layer_sums_ms(model, size, num_tokens)
    alone_ms = layer_sums_ms(load_model_config(_SHAPES / "gemma-4-26b-a4b"), size, num_tokens)
    assert (alone_ms, sums_ms) == (0.0, pytest.approx(3 * 0.0046, rel=0.1))
    assert min(estimated_costs(model, 2, on_gpu=True, num_rows=num_tokens).layers) > sums_ms

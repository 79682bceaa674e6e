"""What `raypp info` says of layers over latents, against what an H200 took (benchmarks/REPORT.md, Latent attention)."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypp.config.engine_config import EngineConfig
from raypp.models.config import load_model_config
from raypp.models.member_sizes import of_one_member
from raypp.plan.cost_model import estimated_costs
from raypp.plan.fit import describe_fit
from raypp.plan.hardware import read_machines

SHAPES = Path(__file__).parents[3] / "benchmarks" / "models"


def test_one_request() -> None:
    model = load_model_config(SHAPES / "glm-4.7-flash")
    costs = estimated_costs(model, 2, on_gpu=True, num_rows=1, num_seen=[256.0] * model.num_layers)
    assert sum(costs.of_stages([model.num_layers])) == pytest.approx(4.87, rel=0.05)


@pytest.mark.parametrize(
    ("name", "num_members", "num_rows", "context", "measured_us"),
    [
        ("deepseek-v3", 1, 16, 8192, 160),
        ("deepseek-v3", 1, 64, 8192, 552),
        ("deepseek-v3", 8, 64, 8192, 168),
        ("glm-4.7-flash", 1, 64, 8192, 211),
    ],
)
def test_decode_rows_over_latents(name: str, num_members: int, num_rows: int, context: int, measured_us: float) -> None:
    """With many heads the products take longer than the memory, which is read once for all."""
    model = load_model_config(SHAPES / name)
    if num_members > 1:
        model = of_one_member(model, num_members)
    seen = [float(num_rows * context)] * model.num_layers
    with_context, without = (
        estimated_costs(model, 2, on_gpu=True, num_rows=num_rows, num_seen=each).layers[0] for each in (seen, None)
    )
    assert 1000 * (with_context - without) == pytest.approx(measured_us, rel=0.35)


@pytest.mark.parametrize(
    ("name", "gpus", "advised", "fewest_tokens"),
    [
        ("deepseek-v3", "8x80GB+8x80GB", (4, 4), 1_300_000),
        ("deepseek-v3", "8x141GB", (4, 2), 2_000_000),
        ("kimi-k2", "8x80GB+8x80GB", (4, 4), 200_000),
        ("kimi-k2", "8x141GB", None, 0),  # a terabyte
        ("kimi-k2-int4", "8x141GB", (2, 4), 1_300_000),
    ],
)
def test_what_fits(name: str, gpus: str, advised: tuple[int, int] | None, fewest_tokens: int) -> None:
    cuts = describe_fit(EngineConfig.from_flat(str(SHAPES / name)), read_machines(gpus))["fit"]["cuts"]
    found = [cut for cut in cuts if cut["is_advised"]]
    assert [(cut["num_stages"], cut["tensor_parallel_size"]) for cut in found] == ([advised] if advised else [])
    assert all(cut["num_kv_tokens"] > fewest_tokens for cut in found)

"""What `raypp info` says of models with experts, by config.json alone: on GPUs that are not here."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypp.cli.info import fit_lines
from raypp.config.engine_config import EngineConfig
from raypp.plan.fit import describe_fit
from raypp.plan.hardware import read_machines

_MODELS = Path(__file__).parents[3] / "benchmarks" / "models"
_PARAMETERS = {"qwen3-30b-a3b": (30.5, 3.0), "qwen3-235b-a22b": (235.1, 21.6)}
_BYTES = {"": 2.0, "-fp8": 1.0, "-awq": 0.524}
"""Of a parameter of the layers; AWQ has a scale of 16 bits and a zero for 128 elements."""


@pytest.mark.parametrize("gpus", ["8x80GB", "8x141GB"])
@pytest.mark.parametrize("form", ["", "-fp8", "-awq"])
@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "qwen3-235b-a22b"])
def test_what_fits(name: str, form: str, gpus: str) -> None:
    config = EngineConfig.from_flat(_MODELS / f"{name}{form}", num_stages=8)
    fit = describe_fit(config, read_machines(gpus))["fit"]
    total, active = _PARAMETERS[name]
    assert fit["fits"]
    assert fit["num_parameters"] / 1e9 == pytest.approx(total, abs=0.05)
    assert fit["num_active_parameters"] / 1e9 == pytest.approx(active, abs=0.1)
    assert fit["quantization"] == (form[1:] or None)
    weight_bytes = sum(stage["weight_bytes"] for stage in fit["stages"])
    assert weight_bytes / fit["num_parameters"] == pytest.approx(_BYTES[form], rel=0.08)
    lines = list(fit_lines(fit))
    assert lines[1].startswith(f"{total} billion parameters, ")
    assert lines[3].startswith("It fits. KV cache: ")


@pytest.mark.parametrize(("form", "least"), [("", 8), ("-fp8", 4), ("-awq", 2)])
def test_fewer_gpus_hold_fewer_bits(form: str, least: int) -> None:
    """Of Qwen3-235B-A22B, on GPUs of 80 GB."""
    for num_stages in (2, 4, 8):
        config = EngineConfig.from_flat(_MODELS / f"qwen3-235b-a22b{form}", num_stages=num_stages)
        fit = describe_fit(config, read_machines(f"{num_stages}x80GB"))["fit"]
        assert fit["fits"] == (num_stages >= least)


def test_whole_experts_of_members_keep_their_form() -> None:
    """What a member holds of them is a quarter, where parts would have 16 bits in `down`: of 192 inputs."""
    found = {}
    for asked in (None, True, False):
        settings = {"tensor_parallel_size": 4, "enable_expert_parallel": asked}
        config = EngineConfig.from_flat(_MODELS / "qwen3-30b-a3b-fp8", **settings)
        fit = describe_fit(config, read_machines("4x80GB"))["fit"]
        found[asked] = fit["stages"][0]["weight_bytes"]
        says_so = "each member has 32 experts of a layer, whole" in list(fit_lines(fit))[1]
        assert says_so == (asked is not False)
    assert found[None] == found[True]
    assert 1.25 < found[False] / found[True] < 1.35

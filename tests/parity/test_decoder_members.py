"""Members of stages of transformers' modules: tokens equal transformers' own, of every type that is tried.

Two members on two stages, and four on one; of some types also four on two stages, and two on one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from shrunken_models import make_shrunken
from test_any_decoder import IN_CI, IN_SOAK, RUNS, STATES, compare

from raypp.models import config as config_module
from raypp.models.transformers_probe import answer

NOTHING_TO_CUT = ("falcon_mamba", "mamba", "mamba2")
CELLS = (
    (RUNS[1] | {"tensor_parallel_size": 2}, RUNS[2] | {"num_stages": 1, "tensor_parallel_size": 4}),
    (RUNS[1] | {"tensor_parallel_size": 4}, RUNS[2] | {"num_stages": 1, "tensor_parallel_size": 2}),
)
QUICK = (
    "deepseek_v3",  # latents are whole, what is made of them is not
    "gpt_oss",  # no plan of its own: sinks, experts with biases, inputs before outputs
    "lfm2",  # short convolutions are whole
    "mistral",
    "phi3",  # queries, keys and values in one weight, gate and up in another
    "qwen3_moe",
)
IN_ALL_CELLS = (
    *QUICK,
    *("afmoe", "bamba", "glm4", "granitemoe", "granitemoe_swa", "hunyuan_v1_dense", "jamba", "mimo_v2_flash"),
    *("nemotron", "nemotron_h", "olmo3", "opt", "phimoe", "stablelm"),
)


@pytest.fixture(autouse=True)
def _asked_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask transformers in this process: another one takes seconds to start."""
    monkeypatch.setattr(config_module, "asked", lambda _, path, *given, **options: answer(path, *given, **options))


def _cells() -> list[Any]:
    types = [name for name in (*IN_CI, *IN_SOAK) if name not in NOTHING_TO_CUT]
    cells = [(name, 0) for name in types] + [(name, 1) for name in IN_ALL_CELLS]
    return [pytest.param(*each, marks=[] if each[0] in QUICK and not each[1] else pytest.mark.full) for each in cells]


@pytest.mark.in_ci("gpt_oss-0", "lfm2-0", "phi3-0", "deepseek_v3-0")
@pytest.mark.parametrize(("model_type", "cell"), _cells())
def test_greedy_tokens_equal_transformers(model_type: str, cell: int, tmp_path: Path) -> None:
    values = IN_CI.get(model_type) or STATES.get(model_type) or {}
    compare(make_shrunken(model_type, tmp_path, **values), CELLS[cell])

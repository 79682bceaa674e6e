"""`raypp tune` measures stages on a GPU as it does on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from model_configs import write_config

from raypp.config.engine_config import EngineConfig
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.plan.measure import measure_costs
from raypp.types import SamplingParams


@pytest.mark.parametrize("num_prompt_tokens", [0, 100])
def test_parts_are_measured(tmp_path: Path, num_prompt_tokens: int) -> None:
    config = EngineConfig.from_flat(
        str(write_config("small", 4, tmp_path)),
        load_format="dummy",
        device="cuda",
        num_stages=2,
        skip_tokenizer_init=True,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        max_model_len=512,
    )
    plan = plan_engine(config, Hardware(2, 1 << 34, 1, "this one", 16 << 30, (9, 0)))
    params = SamplingParams(temperature=1.0)
    costs = measure_costs(plan, num_rows=8, context_len=64, params=params, num_prompt_tokens=num_prompt_tokens)
    assert len(costs.layers_ms) == 4
    assert all(ms >= 0 for ms in costs.layers_ms)

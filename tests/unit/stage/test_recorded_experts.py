"""Recorded steps of models with experts: each replay follows its own tokens' routing."""

from __future__ import annotations

from pathlib import Path

import pytest
from hf_models import EXPERT_FAMILIES, make_checkpoint
from op_tape import spoiling_tape_graphs, tape_graphs
from sizes import sized

from raypp.config.engine_config import EngineConfig
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.testing import LocalEngine, build_local_pipeline
from raypp.types import SamplingParams


@pytest.mark.parametrize("family", sized(EXPERT_FAMILIES[:1], EXPERT_FAMILIES))
def test_recorded_and_called_steps_yield_the_same(tmp_path: Path, family: str) -> None:
    path = make_checkpoint(family, 2, tmp_path)  # 6 of 60 experts
    settings = {
        "num_stages": 2,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "block_size": 4,
        "max_model_len": 96,
        "num_kv_blocks": 100,
        "skip_tokenizer_init": True,
    }
    prompts = [[5 + i, 80 + i, 99, 20 + 3 * i] * (2 + i % 4) for i in range(6)]
    params = [SamplingParams(max_tokens=8 + i % 5, temperature=0.0, ignore_eos=True) for i in range(6)]
    texts = []
    for make_graphs in (None, tape_graphs, spoiling_tape_graphs):
        mode = "none" if make_graphs is None else "full_and_piecewise"
        config = EngineConfig.from_flat(str(path), mode=mode, max_piecewise_tokens=32, **settings)
        plan = plan_engine(config, Hardware(1))
        pipeline = build_local_pipeline(plan, make_graphs=make_graphs)
        texts.append(LocalEngine(plan, pipeline=pipeline).generate(prompts, params))
    assert texts[0] == texts[1] == texts[2]
    assert len({tuple(text) for text in texts[0]}) > 1

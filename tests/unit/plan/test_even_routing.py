"""The setting `even_routing`: it reaches the layers of models with experts, for others it is a contradiction."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from raypp.config.engine_config import EngineConfig
from raypp.errors import ConfigError
from raypp.ops.backend import Routing, choose_experts
from raypp.ops.cpu import torch_kernels
from raypp.plan.engine_plan import EnginePlan, plan_engine
from raypp.plan.hardware import Hardware
from raypp.testing import LocalEngine
from raypp.types import SamplingParams

_DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
_SPARSE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 7,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
}


def _plan(path: Path, values: dict[str, object], **settings: object) -> EnginePlan:
    (path / "config.json").write_text(json.dumps(values))
    config = EngineConfig.from_flat(
        str(path), load_format="dummy", skip_tokenizer_init=True, num_kv_blocks=64, num_stages=2, **settings
    )
    return plan_engine(config, Hardware(1))


def test_it_reaches_the_layers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    met: list[bool] = []

    def spy(logits: torch.Tensor, routing: Routing, *others: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        met.append(routing.is_even)
        return choose_experts(logits, routing, *others)

    monkeypatch.setattr(torch_kernels, "choose_experts", spy)
    for even in (False, True):
        plan = _plan(tmp_path, {**_DENSE, **_SPARSE}, even_routing=even)
        assert ("texts are nonsense" in caplog.text) == even
        met.clear()
        LocalEngine(plan).generate([[3, 5, 7]], [SamplingParams(max_tokens=2)])
        assert set(met) == {even}


def test_a_dense_model_has_nothing_to_choose(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"even_routing=true, Qwen3ForCausalLM, which is dense"):
        _plan(tmp_path, _DENSE, even_routing=True)

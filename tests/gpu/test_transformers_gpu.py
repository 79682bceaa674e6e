"""Models of transformers' modules on a GPU: eager, piecewise and full graphs, without waiting for the device."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import transformers
from quantized_tensors import quantize_experts
from shrunken_models import make_shrunken
from test_hidden_waits import waits_are_errors

from raypp.config.engine_config import EngineConfig
from raypp.plan.engine_plan import EnginePlan, plan_engine
from raypp.plan.hardware import Hardware
from raypp.stage.step_sizes import StepSizes
from raypp.testing import LocalEngine
from raypp.testing.local_engine import LocalPipeline, build_local_stages
from raypp.testing.try_decoder import prompts
from raypp.types import SamplingParams

NUM_TOKENS = 12
MOST_LOST = 0.03
"""Of the distance between the best and the mean logit, in the mean over tokens: what bf16 may change. Transformers' own
bf16 loses 0.011 of gpt-oss: where another expert is chosen, a token loses 0.3."""
MOST_LOST_OF_FP8 = 0.1
"""Weights and activations have three bits behind the point."""
TYPES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 64},
    "qwen3_moe": {"head_dim": 64},
    "gemma3_text": {"head_dim": 64, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gpt_oss": {"head_dim": 64},
    "glm4_moe": {"head_dim": 64},
    "deepseek_v3": {"qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 64, "head_dim": 16},
    "gemma4_text": {  # E2B and E4B: inputs of layers, and layers with the keys and values of others
        "head_dim": 64,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "per_layer_config": {index: {"head_dim": 512, "num_key_value_heads": 1} for index in (1, 3, 5)},
        "hidden_size_per_layer_input": 32,
        "use_double_wide_mlp": True,
    },
}
NATIVE = {name: TYPES[name] for name in ("gemma3_text", "gpt_oss", "glm4_moe", "deepseek_v3")} | {
    "minimax_m2": {"head_dim": 64},
    "gemma4_text": {
        "head_dim": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "per_layer_config": {index: {"head_dim": 512, "num_key_value_heads": 1} for index in (1, 3)},
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
}
"""Types with layers of raypp's own some of whose parts have no kernel."""
OF_STATES: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
    "nemotron_h": {"head_dim": 64},
    "qwen3_next": {"head_dim": 64},
    "falcon_h1": {"head_dim": 64},
    "mamba2": {},
}
IS_DRY = "dry_report" in sys.modules  # a dry run's numbers mean nothing


def plan(path: Path, mode: str, **more: Any) -> EnginePlan:
    settings: dict[str, Any] = {
        "model_impl": "transformers",
        "mode": mode,
        "device": "cuda",
        "dtype": "bfloat16",
        "num_stages": 2,
        "stage_num_gpus": 0.5,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_piecewise_tokens": 16,
        "max_model_len": 64,
        "num_kv_blocks": 80,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        **more,
    }
    hardware = Hardware(2, 1 << 34, 1, "this one", 16 << 30, (9, 0))
    return plan_engine(EngineConfig.from_flat(str(path), **settings), hardware)


def generate(path: Path, mode: str, **more: Any) -> list[list[int]]:
    engine = LocalEngine(plan(path, mode, **more))
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    first = engine.generate(prompts(), params)  # what is made when it is first needed is made
    with waits_are_errors():
        again = engine.generate(prompts(), params)
    assert again == first or IS_DRY
    return [list(tokens) for tokens in first]


@pytest.mark.parametrize("mode", ["none", "full_and_piecewise"])
@pytest.mark.parametrize("model_type", TYPES)
def test_tokens_are_transformers(model_type: str, mode: str, tmp_path: Path) -> None:
    path = make_shrunken(model_type, tmp_path, **TYPES[model_type])
    assert_likely(path, generate(path, mode), f"{model_type}, {mode}", MOST_LOST)


@pytest.mark.parametrize("mode", ["none", "full_and_piecewise"])
@pytest.mark.parametrize("model_type", NATIVE)
def test_tokens_of_own_layers_are_transformers(model_type: str, mode: str, tmp_path: Path) -> None:
    path = make_shrunken(model_type, tmp_path, **NATIVE[model_type])
    texts = generate(path, mode, model_impl="raypp")
    assert_likely(path, texts, f"{model_type}, own layers, {mode}", MOST_LOST)


@pytest.mark.skipif(IS_DRY, reason="where checkpoints stand is computed by kernels")
@pytest.mark.parametrize("model_type", OF_STATES)
def test_states_of_rows_are_kept_by_eager_steps(model_type: str, tmp_path: Path) -> None:
    path = make_shrunken(model_type, tmp_path, **OF_STATES[model_type])
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    engine = LocalEngine(plan(path, "auto", enable_prefix_caching=True, speculative=drafts))
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    outputs = [list(tokens) for tokens in engine.generate(prompts(), params)]
    assert engine.stats().num_prefix_hit_tokens
    assert_likely(path, outputs, model_type, MOST_LOST)


@pytest.mark.parametrize("mode", ["none", "full_and_piecewise"])
def test_weights_of_8_bits_are_multiplied_as_they_are(mode: str, tmp_path: Path) -> None:
    path = make_shrunken("qwen3", tmp_path, **TYPES["qwen3"])
    held = plan(path, mode, quantization="fp8").held_model
    assert held.quantization is not None
    assert_likely(path, generate(path, mode, quantization="fp8"), f"qwen3 in FP8, {mode}", MOST_LOST_OF_FP8)


@pytest.mark.parametrize("mode", ["none", "full_and_piecewise"])
def test_experts_in_mxfp4_are_multiplied_as_they_are(mode: str, tmp_path: Path) -> None:
    plain, quantized = make_shrunken("gpt_oss", tmp_path / "plain", **TYPES["gpt_oss"]), tmp_path / "quantized"
    quantize_experts(plain, quantized)
    assert plan(quantized, mode).held_model.quantization is not None
    assert_likely(plain, generate(quantized, mode), f"gpt_oss in MXFP4, {mode}", MOST_LOST)


def assert_likely(path: Path, outputs: list[list[int]], what: str, most_lost: float) -> None:
    """Check that tokens are, in the mean, close to transformers' best ones in float32."""
    if IS_DRY:
        return
    auto = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    lost = []
    for prompt, output in zip(prompts(), outputs, strict=True):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([prompt + output[:-1]]), use_cache=False).logits[0]
        for token, of_token in zip(output, logits[len(prompt) - 1 :].float(), strict=True):
            best = float(of_token.max())
            lost.append((best - float(of_token[token])) / (best - float(of_token.mean())))
    print(f"{what}: {statistics.fmean(lost):.4f} of the distance to the best token, {max(lost):.3f} at most")
    assert statistics.fmean(lost) < most_lost


def test_what_waits_for_the_device_runs_eagerly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers.models.qwen3 import modeling_qwen3

    forward = modeling_qwen3.Qwen3MLP.forward

    def waiting(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        x.sum().item()
        return forward(module, x)

    monkeypatch.setattr(modeling_qwen3.Qwen3MLP, "forward", waiting)
    path = make_shrunken("qwen3", tmp_path, head_dim=64)
    made = plan(path, "auto")
    stages = build_local_stages([made.stage_spec(index) for index in range(2)], made.model)
    warnings = [record.getMessage() for record in caplog.records if "eagerly" in record.getMessage()]
    assert len(warnings) == 2  # of each stage
    assert "layers 0 to 2" in warnings[0]
    assert "modeling_qwen3.py" in warnings[0]
    assert "self.mlp(hidden_states)" in warnings[0]
    assert all(local.stage.graphs.sizes == StepSizes() for local in stages)
    engine = LocalEngine(made, pipeline=LocalPipeline([local.stage for local in stages]))
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    assert [len(tokens) for tokens in engine.generate(prompts(), params)] == [NUM_TOKENS] * len(prompts())

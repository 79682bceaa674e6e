"""Modules of transformers that keep states of rows: what is found of them, what they take, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from shrunken_models import make_shrunken
from transformers.models.lfm2 import modeling_lfm2

from raypp.config.engine_config import EngineConfig
from raypp.errors import ModelLoadError
from raypp.models import config as config_module
from raypp.models.asked import PROBE, asked
from raypp.models.attention_config import ModulesConfig
from raypp.models.sizes import state_bytes_per_row
from raypp.models.transformers_probe import answer
from raypp.ops.row_state import moved_on
from raypp.plan.engine_plan import EnginePlan, plan_engine
from raypp.plan.fit import describe_layers
from raypp.plan.hardware import Hardware
from raypp.stage.build_stage import allocate_kv_caches

LFM2: dict[str, Any] = {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False}


@pytest.fixture(autouse=True)
def _asked_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask transformers in this process: another one takes seconds to start."""
    monkeypatch.setattr(config_module, "asked", lambda _, path, **options: answer(path, **options))


def _plan(path: Path, **more: Any) -> EnginePlan:
    settings = {"model_impl": "transformers", "max_model_len": 64, "stage_num_threads": 1, "skip_tokenizer_init": True}
    return plan_engine(EngineConfig.from_flat(str(path), **(settings | more)), Hardware(1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", ["falcon_h1", "nemotron_h", "mamba2"])
def test_planned_bytes_are_what_is_allocated(model_type: str, dtype: str, tmp_path: Path) -> None:
    """A layer with both states and attention, layers with neither, and a model without attention."""
    path = make_shrunken(model_type, tmp_path)
    ngram = {"method": "ngram", "num_speculative_tokens": 3}
    plan = _plan(path, num_stages=2, dtype=dtype, max_num_seqs=8, speculative=ngram)
    for index, memory in enumerate(plan.memory):
        kept = moved_on(allocate_kv_caches(plan.stage_spec(index), plan.model))
        assert sum(part.nbytes for part in kept) == memory.state_bytes
    assert plan.num_blocks > 8 * 64 // plan.config.cache.block_size
    assert "with a state per request" in describe_layers(plan.model)


def test_kernels_of_an_installed_package_are_not_run_to_find_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "packages" / "fla" / "ops" / "gated_delta_rule"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("def chunk_gated_delta_rule(*_, **__):\n    raise RuntimeError('no GPU')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    assert "error" not in asked(PROBE, make_shrunken("qwen3_next", tmp_path / "model", head_dim=64))


def test_blocks_that_take_no_memory_are_as_many_as_asked(tmp_path: Path) -> None:
    path, hardware = make_shrunken("mamba2", tmp_path), Hardware(2, 1 << 34, 1, "this one", 16 << 30, (9, 0))
    for wanted in (None, 5000):
        more = {
            "device": "cuda",
            "dtype": "bfloat16",
            "num_kv_blocks": wanted,
            "max_num_seqs": 4,
            "max_model_len": 64,
        }
        config = EngineConfig.from_flat(str(path), model_impl="transformers", skip_tokenizer_init=True, **more)
        assert plan_engine(config, hardware).num_blocks == (wanted or 2 * 4 * 4 + 1)


def test_parts_of_a_state_that_are_in_32_bits_stay_so(tmp_path: Path) -> None:
    model = _plan(make_shrunken("nemotron_h", tmp_path)).model
    sizes = [state_bytes_per_row(model, 4, 0, dtype_bytes, has_snapshots=True) for dtype_bytes in (4, 2)]
    [module] = model.attention[0].modules if isinstance(model.attention[0], ModulesConfig) else [None]
    assert module is not None
    recurrent = 8 * 16 * 16 * 4  # heads, their size, elements of a state
    assert sizes[0][0] - recurrent == 2 * (sizes[1][0] - recurrent)
    assert sizes[0][1:] == [0, 0, 0]
    assert module.takes_several


def test_what_takes_one_token_after_a_state_is_found(tmp_path: Path) -> None:
    model = _plan(make_shrunken("jamba", tmp_path, attn_layer_period=2, attn_layer_offset=1)).model
    assert [
        [module.takes_several for module in layer.modules] if isinstance(layer, ModulesConfig) else None
        for layer in model.attention
    ] == [[False], None, [False], None]


@pytest.mark.parametrize(
    ("model_type", "values", "reason"),
    [
        ("zaya", {"num_experts_per_tok": 1}, "ZayaCCAProjection: Tensor, Tensor, Tensor"),
        ("inkling_text", {}, "position_bias"),
        ("zamba2", {"layers_block_type": ["linear_attention", "hybrid"] * 2}, "layers share weights"),
        ("minimax", {}, "MiniMax uses cache of its own"),
        ("rwkv", {"attention_hidden_size": 64}, "neither keys and values nor a state"),
    ],
)
def test_others_are_refused_with_the_reason(
    model_type: str, values: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        _plan(make_shrunken(model_type, tmp_path, **values))


def test_a_module_that_takes_more_of_a_token_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tokens before the step nothing but inputs is kept."""
    forward = modeling_lfm2.Lfm2ShortConv.forward

    def layer(module: Any, hidden_states: torch.Tensor, past_key_values: Any = None, **kwargs: Any) -> torch.Tensor:
        if module.is_attention_layer:
            return hidden_states + module.self_attn(hidden_states, past_key_values=past_key_values, **kwargs)[0]
        mixed: torch.Tensor = module.conv(hidden_states, past_key_values=past_key_values, scale=hidden_states.tanh())
        return hidden_states + mixed

    def scaled(module: Any, hidden_states: torch.Tensor, past_key_values: Any = None, *, scale: torch.Tensor) -> Any:
        return forward(module, hidden_states * scale, past_key_values=past_key_values)

    path = make_shrunken("lfm2", tmp_path, **LFM2)
    monkeypatch.setattr(modeling_lfm2.Lfm2DecoderLayer, "forward", layer)
    monkeypatch.setattr(modeling_lfm2.Lfm2ShortConv, "forward", scaled)
    with pytest.raises(ModelLoadError, match="Lfm2ShortConv with scale"):
        _plan(path)


def test_a_module_that_is_called_twice_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = modeling_lfm2.Lfm2DecoderLayer.forward

    def twice(module: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if not module.is_attention_layer:
            hidden_states = hidden_states + module.conv(hidden_states, past_key_values=kwargs.get("past_key_values"))
        return forward(module, hidden_states, **kwargs)

    path = make_shrunken("lfm2", tmp_path, **LFM2)
    monkeypatch.setattr(modeling_lfm2.Lfm2DecoderLayer, "forward", twice)
    with pytest.raises(ModelLoadError, match="called more than once"):
        _plan(path)

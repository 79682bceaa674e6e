"""Models whose layers keep a state of each row: what config.json says, what checkpoints hold, and what memory holds."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import STATE_FAMILIES, hf_greedy, make_checkpoint
from safetensors.torch import load_file, save_file

from raypp.config.engine_config import EngineConfig
from raypp.errors import ConfigError, ModelLoadError, ResourceError
from raypp.models.attention_config import AttentionConfig, GatedDeltaConfig
from raypp.models.config import load_model_config
from raypp.models.decoder import compile_layers
from raypp.models.registry import build_model
from raypp.models.sizes import state_bytes_per_row
from raypp.models.weights import CheckpointWeights
from raypp.ops.cpu.torch_kernels import TorchKernels
from raypp.ops.row_state import allocate_layer_state
from raypp.ops.state_sizes import RowState
from raypp.plan.engine_plan import EnginePlan, plan_engine
from raypp.plan.hardware import Hardware
from raypp.testing import LocalEngine
from raypp.types import SamplingParams

LARGE = Path(__file__).parents[3] / "benchmarks/models/qwen3.6-27b"
GIB = 1 << 30


def write_config(path: Path, **changes: Any) -> Path:
    """Write the config.json of a large model with some fields changed; ... leaves one out."""
    values = json.loads((LARGE / "config.json").read_text()) | changes
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({name: value for name, value in values.items() if value is not ...}))
    return path


def test_published_sizes() -> None:
    config = load_model_config(LARGE)
    attending = [index for index, layer in enumerate(config.attention) if isinstance(layer, AttentionConfig)]
    assert attending == list(range(3, 64, 4))
    attention, delta = config.attention[3], config.attention[0]
    assert isinstance(attention, AttentionConfig)
    assert attention.rotation[0] == 64
    assert attention.has_gate
    assert attention.row_sizes == (24 * 512, 4 * 256, 4 * 256)
    assert delta == GatedDeltaConfig(num_k_heads=16, num_v_heads=48, k_dim=128, v_dim=128, kernel_size=4)
    assert delta.row_sizes == (2 * 2048 + 6144, 6144, 96)
    assert config.windows == (None,)
    assert (config.group_of(3), config.group_of(4)) == (0, None)


def test_the_interval_says_which_layers_attend_where_the_list_does_not(tmp_path: Path) -> None:
    listed = ["linear_attention", "full_attention"] * 32
    by_list = load_model_config(write_config(tmp_path / "a", layer_types=listed))
    by_interval = load_model_config(write_config(tmp_path / "b", full_attention_interval=2))
    assert by_list.attention == by_interval.attention


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"linear_num_value_heads": 40}, "linear_num_value_heads"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        ({"mamba_ssm_dtype": "float16"}, "mamba_ssm_dtype"),
        ({"partial_rotary_factor": 1.5, "rope_parameters": {"rope_theta": 1e7}}, "partial_rotary_factor"),
        ({"layer_types": ["linear_attention"] * 64}, "layer_types"),
        ({"layer_types": ["mamba"] * 64}, "layer_types"),
        ({"attn_output_gate": False}, "attn_output_gate"),
    ],
)
def test_wrong_fields_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ModelLoadError, match=field):
        load_model_config(write_config(tmp_path, **changes))


@pytest.mark.parametrize("max_drafts", [0, 3, 7])
def test_planned_bytes_of_a_row_are_what_is_allocated(max_drafts: int) -> None:
    config = load_model_config(LARGE)
    planned = state_bytes_per_row(config, 16, max_drafts, 2, has_snapshots=False)
    shape = config.attention[0].cache
    assert isinstance(shape, RowState)
    state = allocate_layer_state(shape, 1, 16, max_drafts, torch.bfloat16, torch.device("cpu"), has_snapshots=False)
    assert planned[0] == sum(part.nbytes for part in state)
    assert sum(planned) == 48 * planned[0]
    a_state_per_token = 48 * 48 * 128 * 128 * 4 * (1 + max_drafts)
    assert sum(planned) < {0: 1.12, 3: 0.3, 7: 0.16}[max_drafts] * a_state_per_token


@pytest.mark.parametrize("family", STATE_FAMILIES)
def test_weights_take_what_is_planned(tmp_path: Path, family: str) -> None:
    path = make_checkpoint(family, 0, tmp_path, min_layers=4)
    config = load_model_config(path)
    model = build_model(
        config, start_layer=0, end_layer=config.num_layers, dtype=torch.float32, device=torch.device("cpu")
    )
    source = CheckpointWeights(path)
    model.load_weights(source)
    assert not source.unread()
    stored = sum(tensor.nbytes for tensor in load_file(path / "model.safetensors").values())
    assert model.weight_bytes == stored


def test_a_checkpoint_with_a_tower_and_a_draft_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without encoders only its text part is read, and what is left is no warning."""
    text = make_checkpoint("qwen3_5", 0, tmp_path / "text", min_layers=4)
    whole = tmp_path / "whole"
    whole.mkdir()
    tensors = load_file(text / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    others = {"mtp.norm.weight": torch.ones(4), "model.visual.merger.norm.weight": torch.ones(4)}
    save_file(renamed | others, whole / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((text / "config.json").read_text())
    tower = {"hidden_size": 16, "num_heads": 1, "intermediate_size": 16, "out_hidden_size": values["hidden_size"]}
    values["rope_parameters"]["mrope_section"] = [1, 1, 1]
    outer = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": values, "vision_config": tower}
    tied = {"tie_word_embeddings": values["tie_word_embeddings"]}
    (whole / "config.json").write_text(json.dumps(outer | tied))
    settings = {"num_stages": 2, "stage_num_threads": 1, "max_model_len": 64, "num_kv_blocks": 40, "num_encoders": 0}
    config = EngineConfig.from_flat(str(whole), **settings)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    with caplog.at_level(logging.WARNING):
        engine = LocalEngine(plan_engine(config, Hardware(1)))
    assert "not used" not in caplog.text
    [found] = engine.generate([prompt], [SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)])
    assert list(found) == hf_greedy(text, prompt, 12)[0]


def _plan(**settings: Any) -> EnginePlan:
    hardware = Hardware(64, 512 * GIB, 2, "this one", 80 * GIB, gpu_capability=(9, 0))
    fixed = {"load_format": "dummy", "device": "cuda", "num_stages": 2}
    return plan_engine(EngineConfig.from_flat(str(LARGE), **(fixed | settings)), hardware)


def test_states_limit_the_requests_that_run(caplog: pytest.LogCaptureFixture) -> None:
    plan = _plan()
    num_rows = plan.config.scheduler.max_num_seqs
    assert 100 < num_rows < 200
    assert f"max_num_seqs is {num_rows} instead of 256" in caplog.text
    assert plan.stage_spec(0).max_num_seqs == num_rows + 2
    assert [stage.state_bytes for stage in plan.stages] == [
        (num_rows + 2 + num_rows // 4) * stage.row_bytes for stage in plan.memory
    ]
    for memory, stage in zip(plan.memory, plan.stages, strict=True):
        assert memory.taken_bytes + stage.kv_cache_bytes <= memory.share_bytes
    assert _plan(max_model_len=2048).config.scheduler.max_num_seqs > num_rows
    assert _plan(max_num_seqs=16).config.scheduler.max_num_seqs == 16


def test_asked_blocks_leave_room_for_all_rows() -> None:
    assert _plan(num_kv_blocks=4000, max_num_seqs=64).config.scheduler.max_num_seqs == 64
    with pytest.raises(ResourceError, match="does not fit"):
        _plan(num_kv_blocks=60_000, max_num_seqs=256)


def test_what_steps_take_falls_with_the_rows() -> None:
    """Else a plan would keep memory for 256 rows with drafts, and run two."""
    drafts = {"method": "ngram", "num_speculative_tokens": 7}
    few, asked = _plan(speculative=drafts, num_stages=1, max_num_seqs=32), _plan(speculative=drafts, num_stages=1)
    assert asked.config.scheduler.max_num_seqs >= few.config.scheduler.max_num_seqs > 10
    assert asked.memory[0].step_bytes <= few.memory[0].step_bytes
    assert asked.asked.scheduler.max_num_seqs == 256
    assert asked.asked.cache.enable_prefix_caching


def test_rows_fit_a_cache_of_given_bytes_on_a_cpu(tmp_path: Path) -> None:
    path = make_checkpoint("qwen3_5", 0, tmp_path, min_layers=4)
    sizes = {"max_model_len": 256, "num_stages": 2, "stage_num_threads": 1}
    plans = [
        plan_engine(EngineConfig.from_flat(str(path), kv_cache_bytes=count, **sizes), Hardware(2))
        for count in (1 << 21, 1 << 30)
    ]
    rows = [plan.config.scheduler.max_num_seqs for plan in plans]
    assert 2 <= rows[0] < rows[1] == 256
    for memory in plans[0].memory:
        assert memory.state_bytes + memory.kv([plans[0].num_blocks]) <= 1 << 21
    with pytest.raises(ResourceError, match="states of 5 rows, snapshots included"):
        plan_engine(EngineConfig.from_flat(str(path), kv_cache_bytes=4096, **sizes), Hardware(2))


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_a_part_of_a_head_stays_a_part_with_other_scaling(tmp_path: Path, family: str) -> None:
    path = make_checkpoint(family, 3, tmp_path, min_layers=4)
    before = load_model_config(path)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    after = load_model_config(path, rope_scaling=yarn)
    [one, *_], [other, *_] = before.attending, after.attending
    assert one.rotation[0] == other.rotation[0] < one.head_dim
    assert other.rotation[1].rope_type == "yarn"


@pytest.mark.in_ci("qwen3_next", "qwen3_5_moe")
@pytest.mark.parametrize("family", STATE_FAMILIES)
def test_layers_of_each_kind_are_compiled(tmp_path: Path, family: str) -> None:
    config = load_model_config(make_checkpoint(family, 0, tmp_path, min_layers=4))
    sizes = {"start_layer": 0, "end_layer": config.num_layers, "dtype": torch.float32, "device": torch.device("cpu")}
    model = build_model(config, **sizes, kernels=TorchKernels(torch.float32, packs_weights=False))
    model.load_weights(CheckpointWeights(tmp_path))
    own = list(model.layers)
    compile_layers(model, 40, "aot_eager")
    with torch.inference_mode():
        for layer, twin in zip(model.layers, own, strict=True):
            for count in (1, 7):
                hidden, attended = torch.randn(count, config.hidden_size), torch.randn(count, twin.output_size)
                torch.testing.assert_close(layer.before_attention(hidden), twin.before_attention(hidden))
                found = layer.after_attention(hidden.clone(), attended)
                torch.testing.assert_close(found, twin.after_attention(hidden.clone(), attended))


def test_prompts_begin_with_snapshots_of_states() -> None:
    for settings, num_snapshots, num_rows in (
        ({}, 4, 22),
        ({"num_state_snapshots": 30}, 30, 48),
        ({"num_state_snapshots": 0}, 0, 18),
        ({"enable_prefix_caching": False}, 0, 18),
    ):
        plan = _plan(max_num_seqs=16, **settings)
        limits = plan.scheduler_limits()
        assert (limits.num_snapshots, limits.enable_prefix_caching) == (num_snapshots, num_snapshots > 0)
        assert plan.memory[0].num_rows == num_rows
    with pytest.raises(ConfigError, match="cpu_kv_bytes has no effect without snapshots"):
        _plan(cpu_kv_bytes=GIB, num_state_snapshots=0)


def test_blocks_and_snapshots_share_cpu_memory() -> None:
    plan = _plan(cpu_kv_bytes=GIB, max_num_seqs=16, num_stages=2)
    largest_row = max(stage.row_bytes for stage in plan.memory)
    largest_block = max(sum(stage.block_bytes) for stage in plan.memory)
    limits = plan.scheduler_limits()
    assert limits.num_cpu_snapshots == plan.stage_spec(0).num_cpu_snapshots == GIB // 2 // largest_row
    assert limits.num_cpu_blocks == GIB // 2 // largest_block
    assert limits.snapshot_bytes == sum(stage.row_bytes for stage in plan.memory)
    assert [stage.cpu_kv_bytes for stage in plan.stages] == [
        limits.num_cpu_snapshots * memory.row_bytes + limits.num_cpu_blocks * sum(memory.block_bytes)
        for memory in plan.memory
    ]
    assert max(stage.cpu_kv_bytes for stage in plan.stages) <= GIB
    assert plan.describe()["num_cpu_state_snapshots"] == limits.num_cpu_snapshots
    assert _plan().num_cpu_snapshots == 0
    with pytest.raises(ResourceError, match="one KV block and one snapshot") as caught:
        _plan(cpu_kv_bytes=largest_row, max_num_seqs=16, num_stages=2)
    assert caught.value.expected == f"at least {2 * max(largest_row, largest_block)}, or 0 for none"

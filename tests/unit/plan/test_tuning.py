"""From times to layers per stage; and the measuring itself, on a model small enough for a test."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from raypp.config.engine_config import EngineConfig
from raypp.errors import ResourceError
from raypp.plan.cost_model import StepCosts, parts_of
from raypp.plan.engine_plan import EnginePlan, plan_engine
from raypp.plan.hardware import Hardware
from raypp.plan.measure import MeasuredCosts, default_context_len, measure_costs, room_of, tune_partition
from raypp.sampling_params import SamplingParams

MACHINE = Hardware(num_cpu_cores=2, memory_bytes=64 << 30)


def _plan(**settings):
    return plan_engine(EngineConfig.from_flat("tiny", **settings), MACHINE)


def _measured(**values: float) -> MeasuredCosts:
    times = {
        "embedding_ms": 0.1,
        "lm_head_ms": 2.0,
        "sampler_ms": 0.5,
        "every_stage_ms": 0.2,
        "first_stage_ms": 0.1,
        "last_stage_ms": 2.5,
    }
    return MeasuredCosts(num_rows=4, context_len=32, num_steps=8, layers_ms=(1.0,) * 6, **{**times, **values})


def test_costs_of_stages():
    costs = StepCosts(layers=[1.0] * 6, every_stage=0.5, first_stage=0.25, last_stage=2.0)
    assert costs.of_stages([3, 2, 1]) == [3.75, 2.5, 3.5]
    assert costs.of_stages([6]) == [8.75]


@pytest.mark.parametrize(
    ("few_ms", "more_ms"),
    [
        ((2.3, 2.2, 4.2), (4.3, 4.2, 6.2)),
        ((2.0, 2.2, 2.1), (4.0, 4.2, 4.1)),  # the first stage does more, and took less
        ((0.5, 0.6, 0.5), (4.5, 4.4, 4.5)),  # less than the layers alone
        ((2.0, 2.0, 2.0), (1.9, 1.9, 1.9)),  # more layers took less
    ],
)
def test_no_part_takes_negative_time(few_ms, more_ms):
    layer_ms, *besides = parts_of(few_ms, more_ms, 1, 3)
    assert layer_ms > 0
    assert min(besides) >= 0
    if few_ms[2] == 4.2:
        assert (layer_ms, *besides) == pytest.approx((1.0, 0.1, 1.2, 2.0))


def test_a_heavy_head_takes_layers_from_the_last_stage_and_the_gain_is_said():
    tuning = tune_partition(_plan(num_stages=2), _measured())
    assert tuning.best.layers == (4, 2)
    assert tuning.best.slowest_ms == pytest.approx(4.7)
    assert tuning.even.layers == (3, 3)
    assert tuning.gain_over(tuning.even) == pytest.approx(5.7 / 4.7 - 1)
    described = tuning.describe()
    assert described["gain_over_even"] == pytest.approx(0.2128, abs=1e-4)
    assert [split["layers"] for split in described["splits"]] == [[4, 2], [3, 3], [4, 2]]


def test_what_is_written_can_be_read_and_keeps_the_other_settings(tmp_path):
    tuning = tune_partition(_plan(num_stages=2, block_size=8, max_model_len=64), _measured(last_stage_ms=0.0))
    path = tmp_path / "tuned.toml"
    path.write_text(tuning.to_toml())
    config = EngineConfig.from_toml(path)
    assert config.parallel.layer_partition == [3, 3]
    assert (config.cache.block_size, config.model.max_model_len) == (8, 64)
    assert path.read_text().startswith("# Layers per stage by `raypp tune`")


def _with_memory(plan: EnginePlan, share_bytes: int) -> EnginePlan:
    return replace(plan, memory=tuple(replace(stage, share_bytes=share_bytes) for stage in plan.memory))


def test_memory_limits_the_layers_of_a_stage():
    plan = _plan(num_stages=2, max_model_len=64, num_kv_blocks=5)
    layer_bytes = plan.stages[0].weight_bytes // plan.stages[0].num_layers
    assert room_of(plan).most_layers() == [6, 6]
    first, last = room_of(_with_memory(plan, 4 * layer_bytes)).most_layers()
    assert 1 <= first < 4
    assert 1 <= last < 4
    with pytest.raises(ResourceError, match="model does not fit"):
        tune_partition(_with_memory(plan, 2 * layer_bytes), _measured())


def test_measuring_finds_times_that_add_up():
    plan = _plan(num_stages=2, max_model_len=256, cpu_kv_bytes=1 << 24)
    assert plan.groups[0].num_cpu_blocks, "which measuring does without"
    measured = measure_costs(plan, num_rows=4, context_len=16, params=SamplingParams(temperature=0.0))
    assert measured.num_steps >= 8
    assert min(measured.layers_ms) > 0
    assert measured.lm_head_ms > 0
    assert measured.embedding_ms > 0
    assert measured.every_stage_ms > -6 * measured.layers_ms[0], (
        "a difference of times: noise of a busy machine at most"
    )
    stages = measured.step_costs().of_stages([3, 3])
    assert all(ms > 0 for ms in stages)


def test_first_rows_decode_until_the_prompts_of_all_are_computed():
    plan = _plan(max_num_batched_tokens=24, max_num_seqs=16, num_stages=2, tensor_parallel_size=2)
    measured = measure_costs(plan, num_rows=16, context_len=64, params=SamplingParams(temperature=0.0))
    assert measured.num_steps >= 8
    assert not measured.sums_ms, "only GPUs' sums are known"
    on_gpus = replace(measured, layers_ms=(2.0,), sums_ms=0.5)
    assert on_gpus.layer_text == "2, 0.5 of these estimated for sums over members"


def test_layers_with_experts_and_without_are_measured_apart(tmp_path):
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [0, 2],
        "norm_topk_prob": True,
        "max_position_embeddings": 512,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = EngineConfig.from_flat(tmp_path, load_format="dummy", num_stages=2, max_model_len=256, device="cpu")
    plan = plan_engine(settings, MACHINE)
    measured = measure_costs(plan, num_rows=4, context_len=16, params=SamplingParams(temperature=0.0))
    dense, sparse, *others = measured.layers_ms
    assert others == [dense, sparse]
    assert dense != sparse
    assert f"{dense:.4g} or {sparse:.4g}" == measured.layer_text
    tuning = tune_partition(plan, measured)
    assert sum(tuning.best.layers) == 4
    assert tuning.best.slowest_ms <= tuning.even.slowest_ms


def test_the_context_that_is_measured_by_default():
    plan = _plan(num_stages=2, num_kv_blocks=1 + 64, block_size=16, max_model_len=512)
    assert default_context_len(plan, 8) == 64
    assert default_context_len(plan, 1) == 256
    assert default_context_len(plan, 4096) == 1

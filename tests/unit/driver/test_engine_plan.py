"""From a configuration to a plan in which nothing is open."""

from __future__ import annotations

import pytest

from raypp.config.engine import EngineConfig
from raypp.driver.engine_plan import EnginePlan, plan_engine
from raypp.driver.hardware import Hardware
from raypp.errors import ConfigError, ModelLoadError, ResourceError


def _plan(num_cores: int = 2, **settings) -> EnginePlan:
    return plan_engine(EngineConfig.from_flat("tiny", **settings), Hardware(num_cores))


def test_the_default_partition_counts_the_lm_head():
    assert [stage.num_layers for stage in _plan(num_stages=2).stages] == [4, 2]
    assert [stage.num_layers for stage in _plan(num_stages=1).stages] == [6]


def test_an_explicit_partition_is_kept():
    plan = _plan(num_stages=3, layer_partition=[1, 2, 3])
    assert [(stage.start_layer, stage.end_layer) for stage in plan.stages] == [(0, 1), (1, 3), (3, 6)]


def test_blocks_are_those_of_the_stage_with_the_most_layers():
    plan = _plan(num_stages=2, kv_cache_bytes=1 << 20, block_size=8, max_model_len=64)
    bytes_per_block_and_layer = 2 * 8 * 2 * 64 * 4  # keys and values, tokens, heads, head size, float32
    assert plan.num_blocks == (1 << 20) // (4 * bytes_per_block_and_layer)
    assert [stage.kv_cache_bytes for stage in plan.stages] == [
        plan.num_blocks * layers * bytes_per_block_and_layer for layers in (4, 2)
    ]


def test_one_core_is_left_to_the_driver():
    assert _plan(2).num_threads == 1
    assert _plan(16).num_threads == 15
    assert _plan(16, num_stages=4).num_threads == 3
    assert _plan(16, stage_num_threads=5).num_threads == 5


def test_nothing_is_open_in_the_resolved_config():
    config = _plan(num_stages=2).resolved_config()
    assert (config.model.dtype, config.model.max_model_len) == ("float32", 4096)
    assert (config.parallel.layer_partition, config.parallel.transport) == ([4, 2], "gloo")
    assert config.cache.num_kv_blocks is not None


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"num_stages": 7}, ConfigError, "more stages than layers"),
        ({"num_stages": 2, "layer_partition": [2, 3]}, ConfigError, "does not add up"),
        ({"max_model_len": 100_000}, ConfigError, "more than the model was made for"),
        ({"max_model_len": 1000, "num_kv_blocks": 4}, ResourceError, "too small for one request"),
        ({"kv_cache_bytes": 100}, ResourceError, "not even one block"),
    ],
)
def test_what_cannot_be_is_refused_with_the_numbers(settings, error, words):
    with pytest.raises(error, match=words) as caught:
        _plan(**settings)
    assert caught.value.got is not None
    assert caught.value.expected is not None


def test_no_such_model():
    with pytest.raises(ModelLoadError):
        plan_engine(EngineConfig.from_flat("/no/such/model"), Hardware(1))


_H200_BYTES = 150_000_000_000


def _gpu_plan(num_gpus: int = 2, **settings) -> EnginePlan:
    hardware = Hardware(16, num_gpus=num_gpus, gpu_memory_bytes=_H200_BYTES)
    return plan_engine(EngineConfig.from_flat("tiny", **settings), hardware)


def test_gpus_are_used_when_there_are_any():
    plan = _gpu_plan(num_stages=2)
    assert (plan.device, plan.dtype, plan.transport) == ("cuda", "bfloat16", "auto")
    assert plan.stage_resources() == {"CPU": 0.01, "GPU": 1.0}
    on_cpu = _gpu_plan(num_stages=2, device="cpu")
    assert (on_cpu.device, on_cpu.dtype, on_cpu.transport) == ("cpu", "float32", "gloo")
    assert on_cpu.stage_resources() == {"CPU": 0.01}


def test_the_kv_cache_takes_what_weights_and_steps_leave_of_the_share():
    whole, half = _gpu_plan(), _gpu_plan(stage_num_gpus=0.5)
    assert 0.45 < half.num_blocks / whole.num_blocks < 0.5  # what is fixed weighs more on a half
    total = whole.stages[0].weight_bytes + whole.stages[0].kv_cache_bytes
    assert 0.85 * _H200_BYTES < total < 0.9 * _H200_BYTES
    assert _gpu_plan(num_kv_blocks=1000).num_blocks == 1000


def test_a_stage_that_does_not_fit_its_gpu_is_refused_with_the_numbers():
    with pytest.raises(ResourceError, match="stage 0 does not fit") as caught:
        _gpu_plan(gpu_memory_utilization=0.01)
    assert "KV blocks" in str(caught.value.got)
    with pytest.raises(ResourceError, match="there is no GPU"):
        _plan(device="cuda")

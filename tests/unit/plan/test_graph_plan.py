"""Which steps are worth recording for which model, and that their memory is planned for."""

from __future__ import annotations

import pytest
from model_configs import write_config

from raypp.config.engine_config import EngineConfig
from raypp.plan.engine_plan import EnginePlan, plan_engine
from raypp.plan.hardware import Hardware

GIB = 1 << 30
H200 = Hardware(16, 128 * GIB, 2, "NVIDIA H200", 140 * GIB)


def _plan(directory, shape: str, num_layers: int, hardware: Hardware = H200, **settings: object) -> EnginePlan:
    path = write_config(shape, num_layers, directory)
    settings = {"load_format": "dummy", "max_num_batched_tokens": 8192} | settings
    return plan_engine(EngineConfig.from_flat(str(path), **settings), hardware)


@pytest.mark.parametrize(
    ("shape", "asked", "batched", "expected"),
    [
        ("qwen3-8b", None, 8192, 1152),  # where launches and products take equally long
        ("qwen3-0.6b", None, 8192, 2048),  # the most
        ("qwen3-0.6b", None, 1000, 1000),
        ("qwen3-8b", 4096, 8192, 4096),
        ("qwen3-8b", 16, 8192, 16),
    ],
)
def test_steps_worth_recording(tmp_path, shape, asked, batched, expected):
    settings = {} if asked is None else {"max_piecewise_tokens": asked}
    plan = _plan(tmp_path, shape, 8, max_num_batched_tokens=batched, num_stages=2, **settings)
    assert plan.graphs.max_piecewise_tokens == expected
    assert plan.describe()["graphs"]["piecewise_tokens"][-1] == expected
    assert plan.resolved_config().graphs.max_piecewise_tokens == expected


def test_memory_is_planned_for_what_is_recorded(tmp_path):
    """More sizes, more memory, fewer KV blocks."""
    settings = {"num_stages": 2, "max_num_seqs": 256}
    plans = [
        _plan(tmp_path, "qwen3-8b", 36, mode="none", **settings),
        _plan(tmp_path, "qwen3-8b", 36, mode="full", **settings),
        _plan(tmp_path, "qwen3-8b", 36, **settings),
        _plan(tmp_path, "qwen3-8b", 36, speculative={"method": "ngram"}, **settings),
    ]
    planned = [plan.graphs.planned_bytes for plan in plans]
    assert planned == sorted(planned)
    assert len(set(planned)) == len(planned)
    assert planned[0] == 0
    assert planned[-1] < 3 * GIB
    blocks = [plan.num_blocks for plan in plans]
    assert blocks == sorted(blocks, reverse=True)
    spare_bytes = H200.gpu_memory_bytes // 10  # gpu_memory_utilization is 0.9
    assert all(plan.graphs.max_bytes == pytest.approx(plan.graphs.planned_bytes + spare_bytes) for plan in plans)
    described = plans[-1].describe()["graphs"]
    assert described["planned_bytes"] == planned[-1]
    assert list(described["full_rows"]) == ["0", "2", "4", "8"]
    assert described["full_rows"]["0"][-1] == described["full_rows"]["8"][-1] == 128
    assert sum(len(rows) for rows in described["full_rows"].values()) <= 60


def test_nothing_is_planned_on_a_cpu(tmp_path):
    plan = _plan(tmp_path, "small", 4, Hardware(4), mode="full_and_piecewise")
    assert plan.graphs.max_bytes is None
    assert plan.graphs.is_required
    assert not _plan(tmp_path, "small", 4, Hardware(4)).graphs.has_full


def test_a_share_of_a_gpu_has_a_share_of_what_is_spare(tmp_path):
    half = _plan(tmp_path, "qwen3-8b", 8, num_stages=2, stage_num_gpus=0.5, gpu_memory_utilization=0.8)
    spare_bytes = half.graphs.max_bytes - half.graphs.planned_bytes
    assert spare_bytes == pytest.approx(0.5 * 0.2 * H200.gpu_memory_bytes)
    tight = _plan(tmp_path, "qwen3-8b", 8, num_stages=2, gpu_memory_utilization=1.0)
    assert tight.graphs.max_bytes == tight.graphs.planned_bytes


def test_the_plan_covers_what_an_h200_took(tmp_path):
    """Two stages of Qwen3-8B: 0.12 GiB on the first, 0.30 GiB on the last."""
    plan = _plan(tmp_path, "qwen3-8b", 36, num_stages=2, max_num_seqs=256)
    assert 2 * 0.30 * GIB < plan.graphs.planned_bytes < 1 * GIB

"""Graphs on a GPU do what their programs do: pieces around attention, whole decode steps, checks of debug mode."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from model_configs import write_config
from recorded_plans import called_graphs, record_plans, run_plans

from raypp.config.engine import EngineConfig
from raypp.driver.engine_plan import EnginePlan, plan_engine
from raypp.driver.hardware import Hardware
from raypp.graphs.manager import CudaGraphManager, graph_maker
from raypp.stage.spec import GraphSpec, StageSpec

MAX_TOKENS = 256
BOTH = GraphSpec(has_full=True, max_piecewise_tokens=MAX_TOKENS)
DRAFTS = {"speculative": {"method": "ngram", "num_speculative_tokens": 3}}


def _plan(directory, shape: str, num_layers: int, num_stages: int, **settings: object) -> EnginePlan:
    settings = {
        "load_format": "dummy",
        "device": "cuda",
        "mode": "none",
        "skip_tokenizer_init": True,
        "max_num_seqs": 24,
        "max_num_batched_tokens": 2 * MAX_TOKENS,
        "min_prefill_chunk_tokens": 256,
        "max_model_len": 2048,
        "num_kv_blocks": 1200,
        "enable_prefix_caching": False,
        "stage_num_gpus": 1.0 / num_stages,
    } | settings
    config = EngineConfig.from_flat(str(write_config(shape, num_layers, directory)), num_stages=num_stages, **settings)
    hardware = Hardware(2, 1 << 34, 1, "this one", torch.cuda.get_device_properties(0).total_memory)
    return plan_engine(config, hardware)


def _graphs(spec: StageSpec) -> CudaGraphManager:
    device = torch.device(spec.device)
    return CudaGraphManager(device, graph_maker(device), debug_every=spec.graphs.debug_every)


@pytest.mark.parametrize("settings", [{}, DRAFTS], ids=["plain", "drafts"])
@pytest.mark.parametrize(("shape", "num_layers"), [("small", 6), ("qwen3-0.6b", 4), ("qwen3-8b", 4)])
def test_replays_and_calls_on_one_stage_and_two(tmp_path, shape, num_layers, settings):
    """One list of mixed plans, bit by bit: graphs against calls on the same padded sizes, two stages against one."""
    two, one = (_plan(tmp_path, shape, num_layers, num_stages, **settings) for num_stages in (2, 1))
    plans = record_plans(two, num_requests=20, max_prompt=700)
    mixed = sum(0 < plan.num_decode_rows < len(plan.rows) for plan in plans)
    large = sum(int(plan.num_scheduled_tokens.sum()) > MAX_TOKENS for plan in plans)
    assert min(mixed, large) > 3
    assert len(plans) > 40
    max_step_rows = two.stage_spec(0).max_step_rows
    called = run_plans(two, plans, BOTH, make_graphs=called_graphs)
    run_plans(two, plans, BOTH, make_graphs=_graphs).assert_equals(called)
    run_plans(one, plans, BOTH, max_step_rows=max_step_rows, make_graphs=_graphs).assert_equals(called)
    checked = run_plans(two, plans, replace(BOTH, debug_every=2), make_graphs=_graphs)
    checked.assert_equals(called)
    print(f"\n{shape}: {len(plans)} plans, {mixed} mixed, {large} too large; {checked.num_compared} replays compared")

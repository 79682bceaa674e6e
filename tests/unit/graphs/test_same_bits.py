"""The same plans on the same padded sizes give the same bits: replayed or called, on one stage or two.

Without a GPU a tape of operations stands for a graph (`op_tape`).
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from typing import Any

import pytest
from op_tape import spoiling_tape_graphs, tape_graphs
from recorded_plans import called_graphs, record_plans, run_plans

from raypp.config.engine_config import EngineConfig
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.stage.stage_spec import GraphSpec

# A campaign of many seeds: TEST_GRAPH_SEEDS=50 pytest tests/unit/graphs/test_same_bits.py -s
SEEDS = range(int(os.environ.get("TEST_GRAPH_SEEDS", "1")))


def _settings(seed: int) -> dict[str, Any]:
    """Return an engine's configuration; over the seeds there are drafts or none, both types, preemption."""
    rng = random.Random(seed)
    block_size = rng.choice((4, 8))
    settings: dict[str, Any] = {
        "dtype": ("float32", "bfloat16")[seed % 2],
        "max_num_seqs": rng.choice((8, 12)),
        "max_num_batched_tokens": rng.choice((48, 64)),
        "block_size": block_size,
        "max_model_len": 128,
        "num_kv_blocks": (1200, 160)[rng.randrange(2)] // block_size,
        "enable_prefix_caching": rng.random() < 0.5,
    }
    if seed % 3 == 1:
        settings["kv_cache_dtype"] = "fp8"
    if num_drafts := (0, 0, 3, 1)[seed % 4]:
        method = {2: "eagle3", 3: "auto", 6: "ngram", 7: "eagle3"}[seed % 8]
        settings["speculative"] = {"method": method, "num_speculative_tokens": num_drafts}
        if method != "ngram":
            settings["speculative"]["model"] = "tiny-eagle3"
    return settings


@pytest.mark.parametrize("seed", SEEDS)
def test_replays_and_calls_on_one_stage_and_several(seed):
    settings, num_stages = _settings(seed), 2 + seed // 4 % 3
    several, one = (
        plan_engine(EngineConfig.from_flat("tiny", num_stages=count, **settings), Hardware(1))
        for count in (num_stages, 1)
    )
    plans = record_plans(several, num_requests=8, max_prompt=40, seed=seed)
    num_mixed = sum(0 < plan.num_decode_rows < len(plan.rows) for plan in plans)
    graphs = GraphSpec(has_full=True, max_piecewise_tokens=40)
    max_step_rows = several.stage_spec(0).max_step_rows
    called = run_plans(several, plans, graphs, make_graphs=called_graphs)
    run_plans(several, plans, graphs, make_graphs=tape_graphs).assert_equals(called)
    run_plans(one, plans, graphs, max_step_rows=max_step_rows, make_graphs=tape_graphs).assert_equals(called)
    checked = run_plans(several, plans, replace(graphs, debug_every=2), make_graphs=tape_graphs)
    checked.assert_equals(called)
    assert checked.num_compared > 20
    print(
        f"\nseed {seed}: {len(plans)} plans, {num_mixed} mixed, {num_stages} stages: the same bits; "
        f"{checked.num_compared} replays compared"
    )


@pytest.mark.parametrize("method", ["eagle3", pytest.param("ngram", marks=pytest.mark.full)])
def test_no_step_reads_what_a_later_replay_may_overwrite(method):
    """Recordings share memory: what one needs for itself lies where those recorded after it leave what they yield."""
    speculative: dict[str, Any] = {"method": method, "free_step_tokens": 14, "forced_acceptance_rate": 0.5}
    if method == "eagle3":
        speculative["model"] = "tiny-eagle3"
    config = EngineConfig.from_flat(
        "tiny", max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64, num_kv_blocks=60, speculative=speculative
    )
    plan = plan_engine(config, Hardware(1))
    plans = record_plans(plan, num_requests=8, max_prompt=20)
    assert len({plan.num_drafts for plan in plans}) > 1
    graphs = GraphSpec(has_full=True, max_piecewise_tokens=16)
    called = run_plans(plan, plans, graphs, make_graphs=called_graphs)
    run_plans(plan, plans, graphs, make_graphs=spoiling_tape_graphs).assert_equals(called)

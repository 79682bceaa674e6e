"""The same plans on the same padded sizes give the same bits: replayed or called, on one stage or two.

Without a GPU a tape of operations stands for a graph (`raypp.testing.op_tape`).
"""

from __future__ import annotations

import pytest
from recorded_plans import called_graphs, record_plans, run_plans

from raypp.config.engine import EngineConfig
from raypp.driver.engine_plan import EnginePlan, plan_engine
from raypp.driver.hardware import Hardware
from raypp.stage.spec import GraphSpec
from raypp.testing.op_tape import tape_graphs

BOTH = GraphSpec(has_full=True, max_piecewise_tokens=64)
CHECKED = GraphSpec(has_full=True, max_piecewise_tokens=64, debug_every=2)


def _plan(num_stages: int, dtype: str, **settings: object) -> EnginePlan:
    settings = {"max_num_seqs": 12, "max_num_batched_tokens": 64, "block_size": 4, "max_model_len": 128} | settings
    config = EngineConfig.from_flat("tiny", num_stages=num_stages, dtype=dtype, num_kv_blocks=300, **settings)
    return plan_engine(config, Hardware(1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_replays_and_calls_on_one_stage_and_two(dtype, num_drafts):
    settings = {"speculative": {"method": "ngram", "num_speculative_tokens": num_drafts}} if num_drafts else {}
    two, one = (_plan(num_stages, dtype, **settings) for num_stages in (2, 1))
    plans = record_plans(two, num_requests=14, max_prompt=40)
    assert len(plans) > 40
    assert sum(plan.num_decode_rows < len(plan.rows) for plan in plans) > 5
    max_step_rows = two.stage_spec(0).max_step_rows
    called = run_plans(two, plans, BOTH, make_graphs=called_graphs)
    replayed = run_plans(two, plans, BOTH, make_graphs=tape_graphs)
    replayed.assert_equals(called)
    run_plans(one, plans, BOTH, max_step_rows=max_step_rows, make_graphs=tape_graphs).assert_equals(called)
    checked = run_plans(two, plans, CHECKED, make_graphs=tape_graphs)
    checked.assert_equals(called)
    assert checked.num_compared > 20

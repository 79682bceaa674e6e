import numpy as np
from drive import Pipeline, make_limits, make_request

from raypp.messages import NO_STEP, StepPlan, pack, unpack
from raypp.scheduler.scheduler import Scheduler


def test_a_plan_says_everything_about_a_row_once():
    scheduler = Scheduler(make_limits(num_stages=1))
    scheduler.add(make_request("a", 6, max_tokens=5, temperature=0.5, top_p=0.9, top_k=3, min_p=0.1))
    scheduler.add(make_request("b", [9, 8], temperature=0.0, top_k=2**40))
    pipeline = Pipeline(scheduler)
    first = unpack(StepPlan, pack(pipeline.dispatch()))
    assert (first.step_id, first.num_decode_rows, first.requires_feedback_of) == (0, 0, NO_STEP)
    assert first.rows.tolist() == first.start_rows.tolist() == [0, 1]
    assert first.num_scheduled_tokens.tolist() == [6, 2]
    assert first.num_computed_tokens.tolist() == [0, 0]
    assert first.samples.tolist() == [True, True]
    assert first.start_prompt_lens.tolist() == first.start_num_tokens.tolist() == [6, 2]
    assert first.start_limits.tolist() == [11, 102]
    assert first.start_token_ids.tolist() == [0, 1, 2, 3, 4, 5, 9, 8]
    assert np.allclose(first.start_params["temperature"], [0.5, 0.0])
    assert np.allclose(first.start_params["top_p"], [0.9, 1.0])
    assert first.start_params["top_k"].tolist() == [3, 2**31 - 1]
    assert np.allclose(first.start_params["min_p"], [0.1, 0.0])
    assert first.block_rows.tolist() == [0, 0, 1]
    assert first.block_positions.tolist() == [0, 1, 0]

    second = pipeline.dispatch()
    assert second.num_decode_rows == 2
    assert second.num_computed_tokens.tolist() == [6, 2]
    assert second.requires_feedback_of == 0
    for name in ("start_rows", "start_token_ids", "start_params", "block_rows", "block_ids"):
        assert len(getattr(second, name)) == 0


def test_only_new_block_table_entries_travel():
    scheduler = Scheduler(make_limits(num_stages=1, block_size=4))
    scheduler.add(make_request("a", 7))
    pipeline = Pipeline(scheduler)
    pipeline.dispatch()
    grown = []
    for _ in range(10):
        plan = pipeline.dispatch()
        grown.append(plan.block_positions.tolist())
        pipeline.answer()
    # The first decode step writes position 7, the last of block 1; from then on a block lasts for four steps.
    assert grown == [[], [2], [], [], [], [3], [], [], [], [4]]

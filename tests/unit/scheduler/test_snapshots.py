"""Where states of rows are kept for prompts that begin alike, and which plans copy them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from drive import Pipeline, make_limits, make_request, make_result

from raypp.messages import NO_STEP, BlockCopies, StateCopies, StepPlan, unpack
from raypp.scheduler.cpu_blocks import CopyOrders
from raypp.scheduler.drafts import FixedDrafts
from raypp.scheduler.scheduler import Scheduler
from raypp.scheduler.state_snapshots import StateSnapshots
from raypp.types import FinishReason


def _pipeline(**limits) -> Pipeline:
    return Pipeline(Scheduler(make_limits(num_stages=1, enable_prefix_caching=True, num_snapshots=4, **limits)))


def _run(pipeline: Pipeline, name: str, prompt: list[int], max_tokens: int = 1) -> int:
    """Return the prompt tokens that a request found computed."""
    request = make_request(name, prompt, max_tokens=max_tokens)
    pipeline.scheduler.add(request)
    pipeline.finish()
    return request.num_cached_tokens


def _copies(plan: StepPlan) -> StateCopies:
    return unpack(StateCopies, plan.state_copies.data)


def test_a_conversation_goes_on_from_its_last_answer():
    pipeline, prompt = _pipeline(), list(range(10))
    assert _run(pipeline, "a", prompt, max_tokens=8) == 0
    answer = [7] * 8  # the last one is not computed
    assert _run(pipeline, "b", prompt) == 8
    assert _run(pipeline, "c", [*prompt, *answer, 1, 2, 3]) == 16
    pipeline.scheduler.check_integrity()


def test_a_chunk_ends_where_prompts_part():
    pipeline, system = _pipeline(), list(range(100, 130))  # 7 full blocks
    prompts = [[*system, *[index] * 20] for index in range(4)]
    assert [_run(pipeline, str(index), prompt) for index, prompt in enumerate(prompts)] == [0, 0, 28, 28]
    [cut] = [plan for plan in pipeline.plans if plan.num_scheduled_tokens.tolist() == [32]]
    assert not cut.samples[0]


def test_a_chunk_may_end_just_before_the_place_where_prompts_part():
    pipeline, system = _pipeline(max_num_batched_tokens=28), list(range(100, 130))
    prompts = [[*system, *[index] * 20] for index in range(3)]
    assert [_run(pipeline, str(index), prompt) for index, prompt in enumerate(prompts)] == [0, 0, 28]


def test_short_beginnings_are_not_worth_a_chunk():
    pipeline = _pipeline(min_prefill_chunk_tokens=32)
    prompts = [[*range(30), *[100 + index] * 20] for index in range(3)]
    assert [_run(pipeline, str(index), prompt) for index, prompt in enumerate(prompts)] == [0, 0, 0]


def test_a_plan_saves_what_the_step_before_left_and_restores_rows_that_start():
    pipeline = _pipeline()
    _run(pipeline, "a", list(range(10)), max_tokens=2)
    _run(pipeline, "b", list(range(10)), max_tokens=2)
    first, second, third, *_ = pipeline.plans
    assert not len(first.state_copies)
    assert _copies(second).saved_rows.tolist() == first.rows.tolist()
    assert _copies(third).restored_rows.tolist() == third.start_rows.tolist()
    assert _copies(third).restored_snapshots.tolist() == _copies(second).saved_snapshots.tolist()


@pytest.mark.parametrize("num_dropped", [0, 1, 2])
def test_an_answer_leaves_none_that_steps_in_flight_may_have_moved_on(num_dropped):
    """A step of four tokens ends a request at one of them; the stages go on behind the last, without drafts."""

    class Falling(FixedDrafts):
        def num_drafts(self, cohort: int, num_rows: int, most: int) -> int:
            return min(next(counts), most)

    counts = iter([3, 0])
    limits = make_limits(num_stages=1, enable_prefix_caching=True, num_snapshots=4, max_drafts=3)
    scheduler = Scheduler(limits, Falling(3))
    request = make_request("a", 6 + num_dropped, eos=frozenset({9}))
    scheduler.add(request)
    first = scheduler.schedule()
    scheduler.update(make_result(first))
    second, third = scheduler.schedule(), scheduler.schedule()
    assert (second.num_drafts, third.num_drafts) == (3, 0)
    result = replace(make_result(second), num_valid=np.array([4], np.int32))
    result.token_ids[0, 3 - num_dropped] = 9
    scheduler.update(result)
    num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
    assert (request.finish_reason, num_tokens) == (FinishReason.STOP, 11)  # the next one ends a block
    scheduler.update(make_result(third))
    other = make_request("b", [*range(6 + num_dropped), *request.output_token_ids, 1, 2])
    scheduler.add(other)
    scheduler.schedule()
    assert other.num_cached_tokens == (4 if num_dropped else 8)  # of the prompt, or of the answer too


def test_the_least_recently_used_makes_room():
    snapshots = StateSnapshots(2)
    for row, key in enumerate((b"a", b"b")):
        snapshots.save(key, row)
    snapshots.take_copies(0)
    snapshots.restore(b"a", 5)
    snapshots.take_copies(1)
    snapshots.save(b"c", 3)
    copies = unpack(StateCopies, snapshots.take_copies(2).data)
    assert (copies.saved_rows.tolist(), copies.saved_snapshots.tolist()) == ([3], [1])
    assert [snapshots.longest_prefix(keys) for keys in ([b"a"], [b"b"], [b"x", b"c", b"y"])] == [1, 0, 2]
    snapshots.save(b"d", 4, b"c")
    snapshots.save(b"e", 4)
    assert [snapshots.longest_prefix([key]) for key in (b"a", b"c", b"d", b"e")] == [0, 0, 1, 1]
    snapshots.take_copies(3)
    assert not np.any(snapshots.take_copies(4))
    snapshots.check_integrity()


def _orders(snapshots: StateSnapshots, step_id: int) -> tuple[CopyOrders, dict[int, int], dict[int, int]]:
    """Return what a plan orders: copies to CPU memory and back, rows to snapshots, and snapshots by rows."""
    snapshots.check_integrity()
    orders, packed = snapshots.in_cpu_memory.take_copies(), snapshots.take_copies(step_id)
    if not len(packed):
        return orders, {}, {}
    copies = unpack(StateCopies, packed.data)
    pairs = ((copies.saved_rows, copies.saved_snapshots), (copies.restored_rows, copies.restored_snapshots))
    saved, restored = (dict(zip(*(part.tolist() for part in pair), strict=True)) for pair in pairs)
    return orders, saved, restored


def test_what_makes_room_goes_to_cpu_memory_and_comes_back_when_a_row_begins_with_it():
    snapshots = StateSnapshots(2, 3)
    snapshots.save(b"a", 0)
    snapshots.save(b"b", 1)
    assert _orders(snapshots, 3) == ((NO_STEP, {}, {}), {0: 0, 1: 1}, {})
    snapshots.save(b"c", 2)
    assert _orders(snapshots, 4) == ((3, {0: 0}, {}), {2: 0}, {})
    assert snapshots.longest_prefix([b"a", b"x"]) == 1
    assert snapshots.can_restore(b"a", beside_others=True)
    snapshots.restore(b"a", 6)  # in the place of b, which step 3 has written
    assert _orders(snapshots, 9) == ((3, {1: 1}, {1: 0}), {}, {6: 1})
    snapshots.save(b"d", 3)
    assert _orders(snapshots, 10) == ((4, {0: 2}, {}), {3: 0}, {})
    snapshots.save(b"e", 3)  # a makes room again: it is in CPU memory already
    assert _orders(snapshots, 11) == ((NO_STEP, {}, {}), {3: 1}, {})
    assert all(snapshots.longest_prefix([key]) for key in (b"a", b"b", b"c", b"d", b"e"))
    assert (snapshots.in_cpu_memory.num_copied_out, snapshots.in_cpu_memory.num_copied_in) == (3, 1)


def test_a_place_that_the_next_plan_reads_is_not_given_away():
    snapshots = StateSnapshots(1, 4)
    for step_id, key in enumerate((b"a", b"b", b"c")):
        snapshots.save(key, 0)
        _orders(snapshots, step_id)
    assert snapshots.can_restore(b"a", beside_others=False)
    snapshots.restore(b"a", 1)
    assert not snapshots.can_restore(b"b", beside_others=False)
    assert snapshots.can_restore(b"a", beside_others=True)  # it will be there
    snapshots.restore(b"a", 2)
    assert _orders(snapshots, 3)[2] == {1: 0, 2: 0}
    assert snapshots.can_restore(b"b", beside_others=False)


def test_a_plan_brings_one_back_beside_others():
    snapshots = StateSnapshots(3, 8)
    for key in (b"a", b"b", b"c", b"d", b"e", b"f"):
        snapshots.save(key, 0)
        _orders(snapshots, 0)
    assert snapshots.can_restore(b"a", beside_others=True)
    snapshots.restore(b"a", 1)
    assert not snapshots.can_restore(b"b", beside_others=True)
    assert snapshots.can_restore(b"b", beside_others=False)


def test_a_copy_that_no_step_has_made_goes_nowhere():
    """One that comes back needs the place of one that the same plan was to save."""
    snapshots = StateSnapshots(1, 4)
    snapshots.save(b"a", 0)
    _orders(snapshots, 0)
    snapshots.save(b"b", 1)
    snapshots.save(b"c", 2)  # b was not written yet
    assert _orders(snapshots, 1) == ((0, {0: 0}, {}), {2: 0}, {})
    snapshots.save(b"d", 3)
    assert snapshots.can_restore(b"a", beside_others=True)
    snapshots.restore(b"a", 4)
    assert _orders(snapshots, 2) == ((1, {0: 1}, {0: 0}), {}, {4: 0})
    assert [snapshots.longest_prefix([key]) for key in (b"a", b"b", b"c", b"d")] == [1, 0, 1, 0]


def test_turns_of_many_conversations_go_on_from_cpu_memory():
    """Few places on the device for blocks and for snapshots: plans order copies of both."""
    pipeline = _pipeline(num_blocks=12, num_cpu_blocks=60, num_cpu_snapshots=20, max_copied_blocks=2)
    prompts = [[100 * user + index for index in range(21)] for user in range(6)]
    for turn in range(3):
        for user, prompt in enumerate(prompts):
            assert _run(pipeline, f"{user} {turn}", prompt, max_tokens=2) == (len(prompt) - 5 if turn else 0)
            pipeline.scheduler.check_integrity()
            prompt += [7, 7, user, turn]
    stats = pipeline.scheduler.stats()
    assert stats.num_blocks_copied_in > 0
    assert stats.num_snapshots_copied_in >= 8
    assert 4 < stats.num_cpu_snapshots <= 20
    ordered = [unpack(BlockCopies, plan.block_copies.data) for plan in pipeline.plans if len(plan.block_copies)]
    assert {group for copies in ordered for group in copies.out_groups.tolist()} == {0, 1}
    assert {group for copies in ordered for group in copies.in_groups.tolist()} == {0, 1}


def test_requests_that_come_together_wait_for_their_snapshots():
    pipeline = _pipeline(num_cpu_snapshots=20, num_cpu_blocks=20)
    prompts = [[100 * user + index for index in range(10)] for user in range(8)]
    for user, prompt in enumerate(prompts):
        _run(pipeline, f"{user}", prompt)
    requests = [make_request(f"{user} again", prompt, max_tokens=4) for user, prompt in enumerate(prompts)]
    for request in requests:
        pipeline.scheduler.add(request)
    pipeline.finish()
    assert [request.num_cached_tokens for request in requests] == [8] * 8
    ordered = [unpack(BlockCopies, plan.block_copies.data) for plan in pipeline.plans if len(plan.block_copies)]
    assert {copies.in_groups.tolist().count(1) for copies in ordered} == {0, 1}

"""What the driver knows of its stages' work: sums, spans for the live picture, time with steps in flight."""

from __future__ import annotations

import time

import numpy as np

from raypp import row_params
from raypp.driver.stage_health import StageActivity
from raypp.messages import NO_STEP, StageReport, StepPlan, Unrecorded, pack, unpack
from raypp.scheduler.step_budget import RooflineCost, StageTimes, StepPredictor, StepWork
from raypp.tracing import FORWARD, ForwardCounter, Tracer, now_ns

ESTIMATE = StageTimes(0.01, 0.01, 1.0, 0.001, 0.01, 1e-5, 1e-6)


def _activity(num_stages: int) -> StageActivity:
    return StageActivity(StepPredictor(RooflineCost(100.0), [ESTIMATE] * num_stages))


def _plan(step_id: int, cohort: int = 0, tokens: tuple[int, ...] = (1, 1)) -> StepPlan:
    values = dict.fromkeys(StepPlan.__dataclass_fields__, np.empty(0, np.int32))
    values |= {
        "step_id": step_id,
        "cohort": cohort,
        "num_drafts": 0,
        "requires_feedback_of": NO_STEP,
        "num_decode_rows": tokens.count(1),
        "rows": np.arange(len(tokens), dtype=np.int32),
        "num_scheduled_tokens": np.array(tokens, np.int32),
        "num_computed_tokens": np.full(len(tokens), 7, np.int32),
        "samples": np.ones(len(tokens), np.bool_),
        "start_params": np.empty(0, row_params.DTYPE),
    }
    return StepPlan(**values)


def _report(step_ids: list[int], ends_us: list[int], num_steps: int = 0, busy_ns: int = 0) -> StageReport:
    ends = np.array(ends_us, np.int64)
    unrecorded = np.arange(len(Unrecorded))
    return StageReport(
        num_steps, busy_ns, busy_ns // 10, np.array(step_ids, np.int64), ends - 10, ends, ends % 3, unrecorded
    )


def test_a_tracer_counts_forwards_even_when_it_records_nothing() -> None:
    tracer = Tracer("stage 0", enabled=False)
    start = now_ns()
    for step_id in range(3):
        tracer.record("wait", step_id, start, start + 500)
        tracer.record(FORWARD, step_id, start + 1000, start + 3000)
    assert tracer.events() == []
    report = unpack(StageReport, pack(tracer.forwards.report()))
    assert tracer.forwards.has_news, "it may not get through"
    tracer.forwards.note_told(report)
    assert (report.num_steps, report.busy_ns) == (3, 6000)
    assert report.step_ids.tolist() == [0, 1, 2]
    assert (report.end_us - report.start_us).tolist() == [2, 2, 2]
    assert abs(report.start_us[0] / 1e6 - time.time()) < 5.0
    assert not tracer.forwards.has_news
    assert tracer.forwards.report().step_ids.tolist() == []


def test_forwards_that_nobody_fetches_do_not_pile_up() -> None:
    counter = ForwardCounter()
    for step_id in range(10_000):
        counter.add(step_id, step_id, step_id + 1)
    report = counter.report()
    assert report.num_steps == report.busy_ns == 10_000
    assert len(report.step_ids) <= 2048
    assert report.step_ids[-1] == 9_999


def test_spans_are_those_after_a_time_and_know_their_step() -> None:
    activity = _activity(2)
    activity.note_dispatched(_plan(0, cohort=0, tokens=(1, 1)))
    activity.note_dispatched(_plan(1, cohort=1, tokens=(1, 30)))
    activity.note_report(0, _report([0, 1], [100, 200], num_steps=2, busy_ns=20_000))
    activity.note_report(1, _report([0], [150], num_steps=1, busy_ns=10_000))
    assert sorted(span[:9] for span in activity.spans_after(0)) == [
        [0, 0, 90, 100, 0, 2, 2, 1, [2, 2, 16, 0, 0, 0, 2]],
        [0, 1, 190, 200, 1, 2, 31, 2, [1, 1, 8, 30, 37, 30 * 7 + 465, 2]],
        [1, 0, 140, 150, 0, 2, 2, 0, [2, 2, 16, 0, 0, 0, 2]],
    ]
    assert [span[:4] for span in activity.spans_after(150)] == [[0, 1, 190, 200]]
    activity.note_graphs([{"full": {"num_graphs": 3}}, {}])
    counts, graphs = {"rows": 0, "tokens": 1, "choice": 2}, {"full": {"num_graphs": 3}}
    assert activity.sums() == [
        {"num_steps": 2, "busy_s": 2e-5, "copy_wait_s": 2e-6, "num_unrecorded": counts, "graphs": graphs},
        {"num_steps": 1, "busy_s": 1e-5, "copy_wait_s": 1e-6, "num_unrecorded": counts, "graphs": {}},
    ]


def test_only_the_last_steps_are_kept() -> None:
    activity = _activity(1)
    for step_id in range(10_000):
        activity.note_dispatched(_plan(step_id))
        activity.note_collected()
    activity.note_report(0, _report([3, 9_999], [10, 20]))
    assert [span[1] for span in activity.spans_after(0)] == [9_999]


def test_active_time_grows_only_while_steps_are_in_flight() -> None:
    activity = _activity(1)
    assert activity.active_s == 0.0
    activity.note_dispatched(_plan(0))
    before = activity.active_s
    while activity.active_s <= before:
        pass
    activity.note_collected()
    after = activity.active_s
    assert after > before
    assert activity.active_s == after


def test_reports_teach_the_predictor_and_spans_say_what_was_expected_before() -> None:
    predictor = StepPredictor(RooflineCost(100.0), [ESTIMATE])
    activity = StageActivity(predictor)
    for step_id in range(3):
        activity.note_dispatched(_plan(step_id, tokens=(1, 30)))
    before = predictor.ms(work_of_step(0))
    activity.note_report(0, _report([0], [100]))  # it took 10 us
    activity.note_report(0, _report([1, 77], [200, 300]))  # a step of which nobody knows is none
    after = predictor.ms(work_of_step(0))
    assert after < before / 50
    expected = {span[1]: span[9] for span in activity.spans_after(0)}
    assert expected[0] == round(before * 1e3)
    assert expected[1] < expected[0] / 50


def work_of_step(step_id: int) -> StepWork:
    other = _activity(1)
    other.note_dispatched(_plan(step_id, tokens=(1, 30)))
    other.note_report(0, _report([step_id], [100]))
    return StepWork(*other.spans_after(0)[0][8])

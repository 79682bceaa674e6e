"""The trace file, and the bubble fraction that is read from it."""

import json

import pytest

from raypp.errors import ConfigError
from raypp.tracing import (
    DRIVER_LANE,
    FORWARD,
    ForwardCounter,
    Lane,
    TraceEvent,
    Tracer,
    bubble_fraction,
    write_chrome_trace,
)


def _lane(name, intervals):
    return Lane(name, [TraceEvent(FORWARD, i, start * 1000, end * 1000) for i, (start, end) in enumerate(intervals)])


def test_a_full_pipe_has_no_bubble(tmp_path):
    steps = [(i * 10, i * 10 + 10) for i in range(20)]
    lanes = [Lane(DRIVER_LANE, []), _lane("stage 0", steps), _lane("stage 1", [(s + 10, e + 10) for s, e in steps])]
    write_chrome_trace(tmp_path / "trace.json", lanes)
    assert bubble_fraction(tmp_path / "trace.json") == pytest.approx(0.0)


def test_one_cohort_on_four_stages_is_three_quarters_bubble(tmp_path):
    lanes = [_lane(f"stage {s}", [(t * 40 + s * 10, t * 40 + s * 10 + 10) for t in range(100)]) for s in range(4)]
    write_chrome_trace(tmp_path / "trace.json", lanes)
    assert bubble_fraction(tmp_path / "trace.json") == pytest.approx(0.75, abs=0.01)


def test_the_file_is_a_chrome_trace_with_a_named_lane_per_process(tmp_path):
    write_chrome_trace(tmp_path / "trace.json", [_lane("stage 0", [(0, 5)])])
    records = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {"name": "stage 0"}} in records
    assert [(r["ts"], r["dur"], r["args"]) for r in records if r["ph"] == "X"] == [(0.0, 5.0, {"step_id": 0})]


@pytest.mark.parametrize("content", ["", "[]", '{"traceEvents": 3}', '{"traceEvents": []}'])
def test_what_is_no_trace_is_refused_by_name(tmp_path, content):
    (tmp_path / "trace.json").write_text(content)
    with pytest.raises(ConfigError, match="trace"):
        bubble_fraction(tmp_path / "trace.json")


def test_a_tracer_forgets_the_oldest_and_records_nothing_unless_enabled():
    tracer, silent = Tracer("stage 0", enabled=True, max_events=10), Tracer("stage 1", enabled=False)
    for step_id in range(25):
        tracer.record(FORWARD, step_id, 0, 1)
        silent.record(FORWARD, step_id, 0, 1)
    assert len(tracer.events()) <= 10
    assert tracer.events()[-1].step_id == 24
    assert silent.events() == []


def test_forwards_of_a_report_that_was_lost_are_in_the_next_one():
    forwards = ForwardCounter()
    forwards.add(0, 0, 10)
    assert forwards.report().step_ids.tolist() == [0]
    forwards.add(1, 10, 20)
    got = forwards.report()
    assert (got.num_steps, got.step_ids.tolist()) == (2, [0, 1])
    forwards.note_told(got)
    assert not forwards.has_news
    forwards.add(2, 20, 30)
    assert forwards.report().step_ids.tolist() == [2]

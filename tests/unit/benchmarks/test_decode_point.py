"""What is measured of decoding at a number of requests."""

import random

import pytest
from decode_point import DecodePoint, measure_point, stage_times
from workload import random_prompts, time_for

from raypp import LLM
from raypp.testing import launch_in_threads
from raypp.tracing import DRIVER_LANE, FORWARD, HOST, Lane, TraceEvent


def test_a_point_is_measured_on_an_engine():
    with LLM("tiny", num_stages=2, launch=launch_in_threads, enable_prefix_caching=False) as llm:
        point = measure_point(llm, num_requests=2, input_len=9, output_len=40, num_runs=2)
    assert len(point.runs_s) == len(point.first_runs_s) == len(point.windows_ns) == 2
    figures = point.figures()
    assert figures["tokens_per_s"] > 0
    assert "tpot_ms" not in figures, "no trace has been read"
    assert point.tokens_per_step == [1.0, 1.0]
    assert all(begun < ended for begun, ended in point.steady_ns)


def test_a_step_yields_what_is_accepted_and_one_more():
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "forced_acceptance_rate": 0.7}
    settings = {"enable_prefix_caching": False, "speculative": drafts}
    with LLM("tiny", num_stages=2, launch=launch_in_threads, **settings) as llm:
        before = llm.stats()
        took = time_for(llm, random_prompts(4, 9, 4000, random.Random(0)), 60)
        after = llm.stats()
    num_rows, num_accepted = (after[name] - before[name] for name in ("num_verified_rows", "num_accepted_tokens"))
    assert took.tokens_per_step == pytest.approx(4 * 59 / num_rows)
    assert num_rows + num_accepted == 4 * 59
    assert took.tokens_per_step > 1.5


def test_time_per_token_leaves_the_first_one_out():
    point = DecodePoint(4, 11, first_runs_s=[0.2, 0.1, 9.0], runs_s=[1.2, 1.1, 5.0])
    assert point.itl_ms == pytest.approx(100)
    assert point.tokens_per_s == pytest.approx(44 / 1.2)


def test_time_per_token_of_the_mean_request_is_that_of_its_steps():
    """Two cohorts take turns, 3 ms each; outside of the window, where prompts are computed, forwards take longer."""
    starts_ms = [0, 50, 100, *range(103, 160, 3), 200]
    forwards = [TraceEvent(FORWARD, i, start * 10**6, start * 10**6 + 1) for i, start in enumerate(starts_ms)]
    lanes = [Lane(DRIVER_LANE, []), Lane("stage 0", []), Lane("stage 1", forwards)]
    for num_requests, tpot_ms in ((16, 2.0), (1, 1.0)):
        point = DecodePoint(num_requests, 11, [0.1], [1.1], steady_ns=[(100 * 10**6, 158 * 10**6)])
        point.tokens_per_step = [2.9, 3.1]
        assert point.tpot_ms is None
        point.note_trace(lanes)
        assert point.tpot_ms == pytest.approx(tpot_ms)
        assert point.figures()["step_ms"] == pytest.approx(3 * tpot_ms)


def test_stage_times_are_those_of_the_windows():
    def lane(name, length_us):
        spans = [TraceEvent(FORWARD, i, i * 10_000, i * 10_000 + length_us * 1000) for i in range(10)]
        return Lane(name, [*spans, TraceEvent(HOST, 2, 20_000, 21_000), TraceEvent("wait", 2, 20_000, 29_000)])

    slow_outside = TraceEvent(FORWARD, 99, 500_000, 900_000)
    lanes = [Lane(DRIVER_LANE, []), lane("stage 0", 3), Lane("stage 1", [*lane("", 5).events, slow_outside])]
    times = stage_times(lanes, [(0, 50_000), (70_000, 90_000)])
    assert times == [{"forward_us": 3.0, "host_us": 1.0}, {"forward_us": 5.0, "host_us": 1.0}]

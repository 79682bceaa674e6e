"""What the decode table measures, and what it says of figures."""

import argparse
import random

import pytest
from decode_engines import PARTS, engine_runs, predicted_s
from decode_point import DecodePoint, measure_point, stage_times
from decode_verdicts import print_speculation, print_verdicts
from peer import COMPARED, on_line
from workload import random_prompts, time_for

from raypp import LLM
from raypp.testing import launch_in_threads
from raypp.tracing import DRIVER_LANE, FORWARD, HOST, Lane, TraceEvent

ARGS = argparse.Namespace(
    parts=list(PARTS), requests=[1, 16, 64, 256, 100], runs=3, input_len=512, output_len=256, num_stages=2
)


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


def test_the_line_goes_through_its_points():
    points = {1: 2.0, 16: 5.0, 64: 5.0}
    assert [on_line(points, x) for x in (1, 6, 16, 40, 64, 256)] == pytest.approx([2, 3, 5, 5, 5, 5])


def test_parts_are_engines_in_their_order_and_have_a_price():
    runs = engine_runs("qwen3-8b", ARGS)
    assert [run.part for run in runs] == [
        "graphs",
        "start again",
        "even",
        "eager",
        "fixed drafts",
        "adaptive drafts",
        "adaptive drafts at 0.7",
    ]
    assert runs[0].requests == (1, 16, 64, 256, 100)
    assert runs[2].settings == {"layer_partition": [18, 18]}
    assert all(predicted_s(run, ARGS) >= predicted_s(run, ARGS, num_points=1) > 0 for run in runs)
    for part, engines in (
        ("speculation", ["graphs", "fixed drafts", "adaptive drafts"]),
        ("adaptive", ["graphs", "adaptive drafts", "adaptive drafts at 0.7"]),
    ):
        alone = engine_runs("qwen3-8b", argparse.Namespace(**{**vars(ARGS), "parts": [part]}))
        assert [run.part for run in alone] == engines, "speculation against what?"


def _figures(itl_ms, tokens_per_s=1e6):
    points = {
        f"{n} requests": {"itl_ms": value, "tpot_ms": value, "tokens_per_s": tokens_per_s, "first_token_ms": 9.0}
        for n, value in itl_ms.items()
    }
    return {"start_s": 20.0, "num_files_compiled": 0, **points}


def test_every_bar_has_a_verdict(capsys):
    bars, good_start = COMPARED["qwen3-8b"].at_most_ms, _figures({})
    good = {f"qwen3-8b {part}": _figures({**bars, 100: 7.0}) for part in ("graphs", "even", "eager")}
    print_verdicts("qwen3-8b", good)
    said = capsys.readouterr().out
    assert said.count("ITL ok") == 4
    assert said.count("tok/s ok") == 4
    assert said.count("line ok") == 1
    assert "MISSED" not in said
    print_verdicts("qwen3-8b", {"qwen3-8b graphs": _figures({**bars, 16: 6.4, 100: 20.0}, tokens_per_s=200.0)})
    said = capsys.readouterr().out
    assert "ITL MISSED by 10.3%" in said
    assert "line MISSED" in said
    assert said.count("tok/s MISSED") == 3, "one request needs 190"
    print_verdicts("qwen3-8b", {"qwen3-8b graphs": {"error": "it did not start"}, "qwen3-8b start again": good_start})
    assert capsys.readouterr().out.count("start: ") == 1


def test_speculation_is_compared_with_the_engine_without(capsys):
    figures = {
        "qwen3-8b graphs": _figures({1: 5.0, 64: 6.0}),
        "qwen3-8b fixed drafts": _figures({1: 2.0, 64: 4.0}),
        "qwen3-8b adaptive drafts": _figures({1: 5.1, 64: 6.3}),
        "qwen3-8b adaptive drafts at 0.7": _figures({64: 4.0}),
    }
    print_speculation("qwen3-8b", figures)
    lines = capsys.readouterr().out.splitlines()
    verdicts = [line.split("x ", 1)[1].split(";")[0] for line in lines]
    assert verdicts == [">= 2.2x ok", ">= 1.6x MISSED by 6.2%", "loss ok", "loss MISSED by 1.9%", ""]
    assert "adaptive drafts at 0.7, 64: 4.000 against 6.000 ms, 1.50x" in lines[-1]

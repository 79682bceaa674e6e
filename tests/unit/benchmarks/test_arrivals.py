"""Latencies of requests that arrive at random moments."""

import argparse
import asyncio
import random

import online_latency
import pytest
from arrivals import RequestTimes, check_num_tokens, percentile, run_arrivals, summarize
from report import GrowingReport

from raypp import AsyncLLM
from raypp.testing import launch_in_threads

ARGS = argparse.Namespace(requests=3, input_len=7, output_len=5, rates=[50.0, float("inf")])


def test_times_of_a_request():
    times = RequestTimes(4, [1.0, 1.5, 2.5, 2.5])
    assert (times.ttft_s, times.e2e_s, times.itls_s) == (1.0, 2.5, [0.5, 1.0, 0.0])
    assert times.tpot_s == pytest.approx(0.5)
    assert summarize([times])["ttft_ms"] == {"mean": 1000.0, "median": 1000.0, "p99": 1000.0}


def test_a_percentile_is_one_of_the_values():
    values = [float(value) for value in range(1, 201)]
    assert (percentile(values, 0.99), percentile(values, 0.5), percentile([3.0], 0.99)) == (198.0, 100.0, 3.0)


def test_requests_arrive_at_their_rate_and_count_from_when_they_were_due():
    sent = []

    async def stream(prompt, num_tokens):
        sent.append((asyncio.get_running_loop().time(), prompt))
        for _ in range(num_tokens):
            yield

    async def run(rate):
        sent.clear()
        return await run_arrivals(stream, [[i] for i in range(40)], 3, rate, random.Random(1))

    times = asyncio.run(run(400.0))
    assert sorted(prompt for _, prompt in sent) == [[i] for i in range(40)]
    assert sent[-1][0] - sent[0][0] > 0.04, "forty requests at 400 a second take about a tenth of a second"
    assert all(request.late_s <= request.ttft_s for request in times)
    asyncio.run(run(float("inf")))
    assert len(sent) == 40


def test_a_request_of_another_length_is_no_result():
    with pytest.raises(ValueError, match="5 tokens, and brought 4"):
        check_num_tokens(4, 5)


def test_an_engine_is_measured_at_every_rate():
    async def run(report):
        async with await AsyncLLM.create("tiny", launch=launch_in_threads, skip_tokenizer_init=True) as llm:
            await online_latency.measure(ARGS, online_latency.engine_stream(llm), 4000, report)

    report = GrowingReport("online_latency", {}, None)
    asyncio.run(run(report))
    assert list(report.figures) == ["50 requests/s", "inf requests/s"]
    for figures in report.figures.values():
        assert {"ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "late_ms"} < set(figures)
        assert figures["ttft_ms"]["median"] < figures["e2e_ms"]["median"]

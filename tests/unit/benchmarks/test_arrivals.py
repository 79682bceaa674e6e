"""Latencies of requests that arrive at random moments."""

import asyncio
import random
import time

import pytest
from arrivals import RequestTimes, Turn, check_num_tokens, percentile, run_arrivals, summarize


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
        for count in range(num_tokens):
            yield [-1] * (count + 1)

    async def run(rate):
        sent.clear()
        conversations = [[Turn([i], 3)] for i in range(40)]
        return await run_arrivals(stream, conversations, rate, random.Random(1))

    times = asyncio.run(run(400.0))
    assert sorted(prompt for _, prompt in sent) == [[i] for i in range(40)]
    assert sent[-1][0] - sent[0][0] > 0.04, "forty requests at 400 a second take about a tenth of a second"
    assert all(request.late_s <= request.ttft_s for request in times)
    asyncio.run(run(float("inf")))
    assert len(sent) == 40


def test_a_request_of_another_length_is_no_result():
    with pytest.raises(ValueError, match="5 tokens, and brought 4"):
        check_num_tokens(4, 5)


def test_a_turn_begins_with_all_that_was_said():
    sent = []

    async def stream(prompt, num_tokens):
        sent.append(list(prompt))
        await asyncio.sleep(0.002)
        yield [7] * num_tokens

    turns = [Turn([1, 2], 1), Turn([3], 2), Turn([4], 1)]
    started_s = time.perf_counter()
    times = asyncio.run(run_arrivals(stream, [turns], float("inf"), random.Random(1)))
    took_s = time.perf_counter() - started_s
    assert sent == [[1, 2], [1, 2, 7, 3], [1, 2, 7, 3, 7, 7, 4]]
    assert [request.num_tokens for request in times] == [1, 2, 1]
    assert all(request.e2e_s >= 0.002 for request in times)
    assert sum(request.e2e_s for request in times) <= took_s, "a turn is due when the one before was answered"


def test_what_was_not_streamed_has_no_times_between_pieces():
    assert RequestTimes(9, [1.0, 3.0], is_streamed=False).itls_s == []

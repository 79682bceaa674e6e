"""The benchmark of latencies under load, against a server."""

import argparse
import asyncio

import aiohttp
from online_latency import http_stream, measure
from report import GrowingReport

ARGS = argparse.Namespace(requests=3, input_len=7, output_len=5, rates=[20.0])


def test_a_server_is_measured(app):
    report = GrowingReport("online_latency", {}, None)

    async def run():
        async with aiohttp.ClientSession(app.url, timeout=aiohttp.ClientTimeout(total=60)) as session:
            await measure(ARGS, http_stream(session), 4000, report)

    asyncio.run(run())
    figures = report.figures["20 requests/s"]
    assert 0 < figures["ttft_ms"]["median"] < figures["e2e_ms"]["median"]

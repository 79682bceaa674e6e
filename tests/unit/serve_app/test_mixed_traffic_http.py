"""The benchmark of mixed traffic, against a server."""

import argparse
import asyncio

import aiohttp
from mixed_traffic import measure_server
from report import GrowingReport
from traffic import parse_traffic

TRAFFIC = {"some": parse_traffic("rate=20,requests=3,input=7,output=5,sampling=qwen3")}
ARGS = argparse.Namespace(traffic=TRAFFIC, runs=1, seed=0, vocab_size=4000)


def test_a_server_is_measured(app, monkeypatch):
    monkeypatch.setattr("mixed_traffic._WARM_UP", TRAFFIC["some"])
    report = GrowingReport("mixed_traffic", {}, None)

    async def run():
        async with aiohttp.ClientSession(app.url, timeout=aiohttp.ClientTimeout(total=60)) as session:
            await measure_server(ARGS, session, report)

    asyncio.run(run())
    (figures,) = report.figures["some"]
    assert (figures["requests"], figures["prompt_tokens"], figures["output_tokens"]) == (3, 21, 15)
    assert 0 < figures["ttft_ms"]["median"] < figures["e2e_ms"]["median"]

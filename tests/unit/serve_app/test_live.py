"""The live picture: real spans of all stages, shared by those who look, asked for only while somebody does."""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from running_app import RunningApp

from raypp.api.async_llm import AsyncLLM
from serve_app.metrics import _SHOWN, LiveFeed


def frames_of(http: httpx.Client, count: int) -> list[dict[str, Any]]:
    text = http.get("/live", params={"frames": count}).text
    return [json.loads(event.removeprefix("data: ")) for event in text.split("\n\n") if event]


def test_frames_show_what_the_stages_did(app: RunningApp, http: httpx.Client) -> None:
    frames, spans = [], {}
    body = {"prompt": ["import", "def"], "max_tokens": 40, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool, http.stream("GET", "/live") as answer:
        lines = answer.iter_lines()
        posted = pool.submit(httpx.post, f"{app.url}/v1/completions", json=body, timeout=60)
        ends = time.monotonic() + 60
        while not posted.done() or {stage for stage, _ in spans} != {0, 1} or frames[-1]["num_running"]:
            assert time.monotonic() < ends, frames[-1]
            if line := next(lines):
                frames.append(json.loads(line.removeprefix("data: ")))
                spans |= {(span[0], span[1]): span for span in frames[-1]["spans"]}
    assert posted.result().status_code == 200
    for (stage, step_id), (_, _, start_us, end_us, cohort, rows, tokens) in spans.items():
        assert 0 < end_us - start_us < 60e6
        assert cohort in (0, 1)
        assert 1 <= rows <= tokens
        if stage == 1 and (0, step_id) in spans:
            assert start_us >= spans[0, step_id][2], "a stage cannot begin a step before the one ahead of it"
    assert all(frame["num_stages"] == 2 and len(frame["busy"]) == 2 for frame in frames)


def test_nothing_is_asked_when_nobody_looks(app: RunningApp, http: httpx.Client) -> None:
    assert len(frames_of(http, 3)) == 3
    live = app.context.live
    app.wait_until(lambda: not live.viewers and live._task is None, "nobody looks and nothing is asked")


def test_viewers_share_what_is_asked(app: RunningApp) -> None:
    with ExitStack() as stack:
        one, two = (stack.enter_context(httpx.Client(base_url=app.url, timeout=30)) for _ in range(2))
        streams = [stack.enter_context(client.stream("GET", "/live")).iter_lines() for client in (one, two)]
        assert all(next(lines).startswith('data: {"time_us":') for lines in streams)
        assert len(app.context.live.viewers) == 2
    app.wait_until(lambda: not app.context.live.viewers, "both have left")


def test_a_wrong_number_of_frames_is_refused(http: httpx.Client) -> None:
    assert http.get("/live", params={"frames": 0}).status_code == 400
    assert http.get("/live", params={"frames": "x"}).status_code == 400


def test_a_clock_that_is_set_back_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 5000.0
    asked_us: list[int] = []

    class Engine:
        async def stats(self, *, spans_after_us: int) -> dict[str, Any]:
            asked_us.append(spans_after_us)
            span = [0, len(asked_us), now_s * 1e6 - 5, now_s * 1e6, 0, 1, 1]
            spans = [span] if span[3] > spans_after_us else []
            shown = {**dict.fromkeys(_SHOWN, 0), "is_recovering": False, "recoveries": {"count": 0}}
            return {**shown, "active_s": 0.0, "stages": [{"busy_s": 0.0}], "spans": spans}

    async def look() -> None:
        nonlocal now_s
        async for _ in LiveFeed(cast("AsyncLLM", Engine()), period_s=0.001).events(6):
            if len(asked_us) == 3:
                now_s = 1000.0

    monkeypatch.setattr("serve_app.metrics.time", SimpleNamespace(time=lambda: now_s, monotonic=time.monotonic))
    asyncio.run(look())
    assert asked_us[0] == 4999e6
    assert asked_us[-1] == 1000e6, "what comes after is asked for, not what came before"

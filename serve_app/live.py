"""The live image of the pipeline: what every stage did in the last moments, for all who look, asked for once.

While nobody looks, nothing is asked.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from raypp.api.async_llm import AsyncLLM
from raypp.errors import RayppError
from serve_app.metrics import busy_shares

_MAX_BACKLOG = 8  # frames that a slow viewer may be behind; older ones are dropped
_FIRST_LOOK_US = 1_000_000  # how far the first frame looks back
_SPAN_FIELDS = 7  # the page knows no more of them

_SHOWN = ("num_running", "num_waiting", "num_in_flight", "kv_usage", "num_generated_tokens", "num_prompt_tokens")
_OF_CLIENT = ("is_recovering", "recoveries")


class LiveFeed:
    """Makes frames of the engine's stats, and hands each to every viewer. Lives on one event loop.

    A frame is `{"time_us", "num_stages", "tokens_per_s", "busy": [...], "bubble", "spans": [...], ...}`; a span is
    `[stage, step_id, start_us, end_us, cohort, rows, tokens]`, times in microseconds since the epoch. While the engine
    is started again a frame has `time_us`, `is_recovering` and `recoveries` alone.
    """

    def __init__(self, llm: AsyncLLM, period_s: float) -> None:
        self._llm = llm
        self._period_s = period_s
        self._viewers: set[asyncio.Queue[str]] = set()
        self._task: asyncio.Task[None] | None = None

    @property
    def num_viewers(self) -> int:
        """How many look."""
        return len(self._viewers)

    async def events(self, num_frames: int | None = None) -> AsyncGenerator[str, None]:
        """Yield frames as server-sent events, without end or as many as asked for."""
        frames: asyncio.Queue[str] = asyncio.Queue(_MAX_BACKLOG)
        self._viewers.add(frames)
        if self._task is None:
            self._task = asyncio.create_task(self._poll())
        try:
            num_sent = 0
            while num_frames is None or num_sent < num_frames:
                yield await frames.get()
                num_sent += 1
        finally:
            self._viewers.discard(frames)
            if not self._viewers:
                await self._stop()

    async def _stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _poll(self) -> None:
        before: Mapping[str, Any] = {}
        before_s = time.monotonic()
        seen_us = int(time.time() * 1e6) - _FIRST_LOOK_US
        while True:
            seen_us = min(seen_us, int(time.time() * 1e6))  # the clock may have been set back
            try:
                stats = await self._llm.stats(spans_after_us=seen_us)
            except RayppError as error:
                self._hand_out({"time_us": int(time.time() * 1e6), "error": str(error)})
            else:
                if before and before["recoveries"]["count"] != stats["recoveries"]["count"]:
                    before = {}  # the engine's counters began anew
                if stats["is_recovering"]:
                    self._hand_out({"time_us": int(time.time() * 1e6), **{name: stats[name] for name in _OF_CLIENT}})
                else:
                    now_s = time.monotonic()
                    self._hand_out(_frame(before, stats, now_s - before_s))
                    # Per stage the reports are in order, but a stage may report a little later than another.
                    seen_us = min(_newest_per_stage(stats), default=seen_us)
                    before, before_s = stats, now_s
            await asyncio.sleep(self._period_s)

    def _hand_out(self, frame: Mapping[str, Any]) -> None:
        event = f"data: {json.dumps(frame, separators=(',', ':'))}\n\n"
        for viewer in self._viewers:
            if viewer.full():
                viewer.get_nowait()
            viewer.put_nowait(event)


def _frame(before: Mapping[str, Any], stats: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    num_new = stats["num_generated_tokens"] - before.get("num_generated_tokens", stats["num_generated_tokens"])
    shares = busy_shares(before, stats) if before else None
    busy, bubble = shares if shares is not None else ([0.0] * len(stats["stages"]), None)
    return {
        "time_us": int(time.time() * 1e6),
        "num_stages": len(stats["stages"]),
        "tokens_per_s": num_new / seconds if seconds > 0 else 0.0,
        "busy": [round(share, 4) for share in busy],
        "bubble": bubble,
        **{name: stats[name] for name in (*_SHOWN, *_OF_CLIENT)},
        "spans": [span[:_SPAN_FIELDS] for span in stats["spans"]],
    }


def _newest_per_stage(stats: Mapping[str, Any]) -> list[int]:
    newest: dict[int, int] = {}
    for stage_index, _, _, end_us, *_ in stats["spans"]:
        newest[stage_index] = max(end_us, newest.get(stage_index, 0))
    # A stage that reported nothing may still have something from before: look back as far as the others came.
    return list(newest.values()) if len(newest) == len(stats["stages"]) else []

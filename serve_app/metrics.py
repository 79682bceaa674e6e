"""What Prometheus and the live page show: the engine's counters, and how long requests and forwards took.

Nothing is global: each replica has its own series, which carry the model's and the replica's name. `merge` puts the
expositions of several replicas together. A series is declared here once; Ray's own metrics show the same ones
(`replica.py`). For dashboards, autoscalers and routers that were made for vLLM the same series have its names, too.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from raypp.api.async_llm import AsyncLLM
from raypp.errors import RayppError
from raypp.types import RequestOutput

_LABELS = ("model", "replica")
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_TOKEN_SECONDS = (0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.012, 0.016, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)

# Name, explanation and key of the engine's stats. A key that an engine does not have is left out.
_GAUGES = (
    ("raypp_requests_running", "Requests that have a row", "num_running"),
    ("raypp_requests_waiting", "Requests that wait for a row", "num_waiting"),
    (
        "raypp_requests_waiting_for_images",
        "Of these, those whose images are not encoded",
        "num_waiting_for_items",
    ),
    ("raypp_steps_in_flight", "Steps dispatched and not collected", "num_in_flight"),
    ("raypp_kv_usage_ratio", "Share of the KV blocks in use, 0 to 1", "kv_usage"),
    ("raypp_kv_blocks", "KV blocks of every stage", "num_blocks"),
    ("raypp_cpu_kv_blocks", "KV blocks that every stage has room for in CPU memory", "num_cpu_blocks"),
    ("raypp_cpu_kv_blocks_used", "Of these, the ones that hold something", "num_used_cpu_blocks"),
    ("raypp_state_snapshots", "Snapshots of recurrent states that prompts may begin with", "num_snapshots"),
    ("raypp_cpu_state_snapshots", "Likewise, those in CPU memory", "num_cpu_snapshots"),
)
_COUNTERS = (
    ("raypp_steps", "Steps dispatched", "num_steps"),
    ("raypp_prompt_tokens", "Prompt tokens of the requests that got a row", "num_prompt_tokens"),
    ("raypp_generated_tokens", "Tokens generated", "num_generated_tokens"),
    ("raypp_preemptions", "Requests that lost their row to others", "num_preemptions"),
    ("raypp_prefix_query_tokens", "Tokens looked up in the prefix cache", "num_prefix_query_tokens"),
    ("raypp_prefix_hit_tokens", "Tokens found in the prefix cache", "num_prefix_hit_tokens"),
    ("raypp_cpu_hit_tokens", "Of these, tokens whose KV came from CPU memory", "num_cpu_hit_tokens"),
    ("raypp_kv_blocks_copied_out", "KV blocks copied to CPU memory, by every stage", "num_blocks_copied_out"),
    ("raypp_kv_blocks_copied_in", "KV blocks copied back, by every stage", "num_blocks_copied_in"),
    ("raypp_kv_copied_bytes", "Bytes of KV blocks copied either way, on all stages", "num_copied_bytes"),
    ("raypp_draft_tokens", "Draft tokens verified", "num_draft_tokens"),
    ("raypp_accepted_tokens", "Draft tokens accepted", "num_accepted_tokens"),
    ("raypp_encoder_items", "Images encoded", "num_encoder_items"),
    ("raypp_encoder_cache_hits", "Images found in the embedding cache", "num_encoder_cache_hits"),
    ("raypp_encoder_tokens", "Tokens encoded, padding included", "num_encoder_tokens"),
    ("raypp_encoder_padding_tokens", "Of these, padding", "num_encoder_padding_tokens"),
)
_STAGE_COUNTERS = (
    ("raypp_stage_busy_seconds", "Time in forwards", "busy_s"),
    ("raypp_stage_copy_wait_seconds", "Time that steps waited for KV blocks on their way", "copy_wait_s"),
)
_RECOVERY_COUNTERS = (
    ("raypp_engine_restarts", "Times that the engine died and was started again", "count"),
    ("raypp_engine_paused_seconds", "Time that requests waited for the engine to be started again", "paused_s"),
    ("raypp_requests_carried_over", "Requests that went on in an engine that was started again", "num_carried_over"),
)
"""Of the client: they go on where the engine's own begin anew."""


class EngineMetrics:
    """All series of one replica. Lives on one event loop."""

    def __init__(self, model: str, replica: str, *, as_vllm: bool = False) -> None:
        """Begin at zero.

        Args:
            model: The model's name.
            replica: The replica's.
            as_vllm: Expose series under vLLM's names, too.
        """
        self._as_vllm = as_vllm
        self._names = (model, replica)
        self.replica = replica
        self._collectors: list[Collector] = [_ProcessSeries(self._names)]
        self._ttft = self._histogram("raypp_time_to_first_token_seconds", "Arrival to first token", _SECONDS)
        self._itl = self._histogram("raypp_inter_token_seconds", "Time between two tokens", _TOKEN_SECONDS)
        self._tpot = self._histogram("raypp_time_per_output_token_seconds", "Mean of a request", _TOKEN_SECONDS)
        self._e2e = self._histogram("raypp_request_seconds", "Arrival to end", _SECONDS)
        self._queue = self._histogram("raypp_queue_seconds", "Arrival to row", _SECONDS)
        self._prompt = self._histogram("raypp_request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
        self._output = self._histogram("raypp_request_output_tokens", "Generated tokens of a request", _TOKENS)
        self._ends = self._counter("raypp_requests_finished", "Sequences by how they ended", "reason")
        self._http = self._counter("raypp_http_responses", "Responses by route and status", "route", "status")
        self._view = self.view()

    def count_end(self, reason: str, num_sequences: int = 1) -> None:
        """Count sequences that ended."""
        self._ends.labels(*self._names, reason).inc(num_sequences)

    def count_response(self, route: str, status: int) -> None:
        """Count an HTTP response."""
        self._http.labels(*self._names, route, str(status)).inc()

    def view(self) -> SeriesView:
        """Return a new view of all series."""
        return SeriesView(self._names, self._collectors)

    def exposition(self, stats: Mapping[str, Any]) -> str:
        """Return all series in Prometheus's text format.

        Args:
            stats: The engine's figures of this moment; empty when it is dead.
        """
        series = self._view.look(stats)
        also = generate_latest(VllmSeries(series)) if self._as_vllm else b""
        return (generate_latest(series) + also).decode()

    def _histogram(self, name: str, what: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(name, what, _LABELS, buckets=buckets, registry=None)
        self._collectors.append(histogram)
        return histogram.labels(*self._names)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        counter = Counter(name, what, (*_LABELS, *labels), registry=None)
        self._collectors.append(counter)
        return counter


class SeriesView:
    """All series of a replica, for one reader: shares of the time are those since its last look."""

    def __init__(self, names: tuple[str, str], collectors: Iterable[Collector]) -> None:
        self._engine = _EngineCollector(names)
        self._registry = CollectorRegistry()
        for collector in (self._engine, *collectors):
            self._registry.register(collector)

    def look(self, stats: Mapping[str, Any]) -> CollectorRegistry:
        """Return the series.

        Args:
            stats: The engine's figures of this moment; empty when it is dead.
        """
        self._engine.take(stats)
        return self._registry


class RequestWatch:
    """Observes the outputs of one prompt, streamed (`see`) or whole (`see_whole`), until `close`.

    Args:
        metrics: What it counts in.
        started_s: Monotonic time at which the request came.
        num_sequences: Continuations of the prompt.
    """

    def __init__(self, metrics: EngineMetrics, started_s: float, num_sequences: int) -> None:
        self._metrics = metrics
        self._started_s = started_s
        self._num_sequences = num_sequences
        self._seen: dict[int, tuple[int, float]] = {}  # by continuation: tokens, and when the last of them came
        self._last: RequestOutput | None = None

    def see(self, output: RequestOutput) -> None:
        """Take in what is new of the outputs."""
        now_s, metrics = time.monotonic(), self._metrics
        if not self._seen:
            metrics._ttft.observe(now_s - self._started_s)
        for completion in output.outputs:
            num_seen, last_s = self._seen.get(completion.index, (0, now_s))
            if num_new := len(completion.token_ids):
                self._seen[completion.index] = (num_seen + num_new, now_s)
                if num_seen:
                    metrics._itl.observe((now_s - last_s) / num_new)
        self._last = output
        if output.finished:
            counts = [self._seen.get(index, (0, now_s))[0] for index in range(self._num_sequences)]
            self._observe_finished(output, counts, now_s - self._started_s)

    def see_whole(self, output: RequestOutput, submitted_s: float) -> None:
        """Take in outputs that were not streamed: the engine's client timed them.

        Args:
            output: Finished.
            submitted_s: Monotonic time at which the client got the request.
        """
        self._last, times = output, output.metrics
        assert times.finish_time_s is not None
        waited_s = submitted_s - self._started_s
        if times.ttft_s is not None:
            self._metrics._ttft.observe(waited_s + times.ttft_s)
        counts = [len(completion.token_ids) for completion in output.outputs]
        self._observe_finished(output, counts, waited_s + times.finish_time_s - times.arrival_time_s)

    def close(self, reason: str = "abort") -> None:
        """Take in that no more outputs come.

        Args:
            reason: Why those ended that have no reason of their own.
        """
        ended = [] if self._last is None else [o.finish_reason for o in self._last.outputs if o.finish_reason]
        for own_reason in ended:
            self._metrics.count_end(own_reason)
        if num_left := self._num_sequences - len(ended):
            self._metrics.count_end(reason, num_left)

    def _observe_finished(self, output: RequestOutput, num_tokens: Iterable[int], seconds: float) -> None:
        metrics = self._metrics
        metrics._e2e.observe(seconds)
        metrics._prompt.observe(len(output.prompt_token_ids))
        if output.metrics.queue_s is not None:
            metrics._queue.observe(output.metrics.queue_s)
        if output.metrics.tpot_s is not None:
            metrics._tpot.observe(output.metrics.tpot_s)
        for count in num_tokens:
            metrics._output.observe(count)


class _ProcessSeries(Collector):
    """What the replica's process takes: processor time, memory, open files, its start. Driver and stages are others."""

    def __init__(self, names: tuple[str, str]) -> None:
        self._labels = dict(zip(_LABELS, names, strict=True))
        self._process = ProcessCollector(registry=None)

    def collect(self) -> Iterator[Metric]:
        """Yield all families; none where the system does not tell."""
        for family in self._process.collect():
            family.samples = [sample._replace(labels=self._labels) for sample in family.samples]
            yield family


class _EngineCollector(Collector):
    """The engine's own counters, as of the last time it was asked."""

    def __init__(self, names: tuple[str, str]) -> None:
        self._names = names
        self._last: Mapping[str, Any] = {}
        self._shares: tuple[list[float], float] | None = None
        self._stats: Mapping[str, Any] = {}

    def take(self, stats: Mapping[str, Any]) -> None:
        """Take in the figures that are exposed from now on."""
        self._stats = stats
        if "stages" in stats:
            self._shares = busy_shares(self._last, stats) or self._shares
            self._last = stats

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the registry need not ask an engine when it is made."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        stats, gauge, counter = self._stats, GaugeMetricFamily, CounterMetricFamily
        is_up = bool(stats) and not stats.get("is_recovering", False)
        yield self._family(gauge, "raypp_engine_up", "Whether the engine answers", [([], float(is_up))])
        for name, what, key in _GAUGES:
            if key in stats:
                yield self._family(gauge, name, what, [([], stats[key])])
        for counters, values in ((_COUNTERS, stats), (_RECOVERY_COUNTERS, stats.get("recoveries", {}))):
            for name, what, key in counters:
                if key in values:
                    yield self._family(counter, name, what, [([], values[key])])
        if "stages" not in stats:
            return
        for name, what, key in _STAGE_COUNTERS:
            by_stage = [([str(index)], stage[key]) for index, stage in enumerate(stats["stages"])]
            yield self._family(counter, name, what, by_stage, "stage")
        yield self._family(counter, "raypp_active_seconds", "Time with steps in flight", [([], stats["active_s"])])
        if self._shares is not None:
            shares, bubble = self._shares
            yield self._family(
                gauge,
                "raypp_stage_busy_ratio",
                "Share of the time with steps in flight in which the stage computed, since the last look",
                [([str(index)], share) for index, share in enumerate(shares)],
                "stage",
            )
            what = "Share of it in which a stage did not, over all stages"
            yield self._family(gauge, "raypp_bubble_ratio", what, [([], bubble)])

    def _family(
        self,
        kind: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        what: str,
        values: list[tuple[list[str], float]],
        *labels: str,
    ) -> Metric:
        family = kind(name, what, labels=(*_LABELS, *labels))
        for extra, value in values:
            family.add_metric([*self._names, *extra], value)
        return family


def busy_shares(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[list[float], float] | None:
    """Return each stage's busy share between two looks at the stats, 0..1, and the bubble; None if nothing ran.

    The share is of the time with steps in flight: an idle engine has no bubble. A restarted engine counts anew, and may
    have another number of stages.
    """
    if len(before.get("stages", ())) != len(after["stages"]) or before.get("active_s", 0.0) > after["active_s"]:
        before = {}
    active_s = after["active_s"] - before.get("active_s", 0.0)
    if active_s <= 0:
        return None
    old = [stage["busy_s"] for stage in before.get("stages", ())] or [0.0] * len(after["stages"])
    busy = [stage["busy_s"] - base for stage, base in zip(after["stages"], old, strict=True)]
    shares = [min(max(seconds / active_s, 0.0), 1.0) for seconds in busy]
    return shares, 1.0 - sum(shares) / len(shares)


def merge(expositions: Sequence[str]) -> str:
    """Return several replicas' expositions as one: each family's lines together, explained once."""
    explanations: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for text in expositions:
        family = ""
        for line in text.splitlines():
            if line.startswith("# HELP "):
                family = line.split(" ", 3)[2]
                samples.setdefault(family, [])
            if family.endswith("_created"):  # when each series began: of no use, and a third of the text
                continue
            if not line.startswith("#"):
                samples[family].append(line)
            elif line not in explanations.setdefault(family, []):
                explanations[family].append(line)
    return "".join(f"{line}\n" for family in samples for line in explanations.get(family, []) + samples[family])


VLLM_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "raypp_requests_running": ("num_requests_running",),
        "raypp_requests_waiting": ("num_requests_waiting",),
        "raypp_kv_usage_ratio": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
        "raypp_preemptions": ("num_preemptions",),
        "raypp_prompt_tokens": ("prompt_tokens",),
        "raypp_generated_tokens": ("generation_tokens",),
        "raypp_prefix_query_tokens": ("prefix_cache_queries", "gpu_prefix_cache_queries"),
        "raypp_prefix_hit_tokens": ("prefix_cache_hits", "gpu_prefix_cache_hits"),
        "raypp_draft_tokens": ("spec_decode_num_draft_tokens",),
        "raypp_accepted_tokens": ("spec_decode_num_accepted_tokens",),
        "raypp_time_to_first_token_seconds": ("time_to_first_token_seconds",),
        "raypp_inter_token_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
        "raypp_time_per_output_token_seconds": ("request_time_per_output_token_seconds",),
        "raypp_request_seconds": ("e2e_request_latency_seconds",),
        "raypp_queue_seconds": ("request_queue_time_seconds",),
        "raypp_request_prompt_tokens": ("request_prompt_tokens",),
        "raypp_request_output_tokens": ("request_generation_tokens",),
        "raypp_requests_finished": ("request_success",),
    }
)
"""vLLM's names, without `vllm:`, by raypp's."""

_VLLM_LABELS = {"model": "model_name", "replica": "engine", "reason": "finished_reason"}


class VllmSeries(Collector):
    """Families of another collector, renamed; those that vLLM does not have are left out."""

    def __init__(self, own: Collector) -> None:
        self._own = own

    def collect(self) -> Iterator[Metric]:
        """Yield the families that both have, under each of vLLM's names."""
        for family in self._own.collect():
            for name in VLLM_NAMES.get(family.name, ()):
                renamed = Metric(f"vllm:{name}", family.documentation, family.type)
                for sample in family.samples:
                    labels = {_VLLM_LABELS.get(label, label): value for label, value in sample.labels.items()}
                    full_name = renamed.name + sample.name.removeprefix(family.name)
                    renamed.samples.append(sample._replace(name=full_name, labels=labels))
                yield renamed


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
        self.viewers: set[asyncio.Queue[str]] = set()
        self._task: asyncio.Task[None] | None = None

    async def events(self, num_frames: int | None = None) -> AsyncGenerator[str, None]:
        """Yield frames as server-sent events, without end or as many as asked for."""
        frames: asyncio.Queue[str] = asyncio.Queue(_MAX_BACKLOG)
        self.viewers.add(frames)
        if self._task is None:
            self._task = asyncio.create_task(self._poll())
        try:
            num_sent = 0
            while num_frames is None or num_sent < num_frames:
                yield await frames.get()
                num_sent += 1
        finally:
            self.viewers.discard(frames)
            if not self.viewers:
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
        for viewer in self.viewers:
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

"""What monitors see: of a living engine, and of one that died."""

from __future__ import annotations

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from running_app import RunningApp, running_app

import raypp
from raypp.testing import FakeStage
from serve_app import replica
from serve_app.metrics import VLLM_NAMES, EngineMetrics, busy_shares, merge


def series(text: str) -> dict[str, float]:
    return {
        sample.name + "".join(sorted(f"|{k}={v}" for k, v in sample.labels.items() if k not in ("model", "replica"))): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_models_health_and_version(http: httpx.Client) -> None:
    [model] = http.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 256)
    assert http.get("/v1/models/tiny").json() == model
    assert http.get("/v1/models/other").status_code == 404
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/ping").json() == http.post("/ping").json() == {"status": "ok"}
    assert http.get("/version").json() == {"version": raypp.__version__}


@pytest.mark.parametrize("path", ["/", "/page/answer.js", "/v1/models", "/health", "/ping", "/ready", "/live", "/no"])
def test_head_is_answered_like_get_without_a_body(http: httpx.Client, path: str) -> None:
    head = http.head(path)  # over one connection: the next answer is read from where this one ends
    with http.stream("GET", path) as got:
        assert (head.status_code, head.content) == (got.status_code, b"")
        for name in ("content-type", "content-length", "cache-control"):
            assert head.headers.get(name) == got.headers.get(name)
    if got.is_success:
        label = path.replace("answer.js", "{name}")
        assert f'route="{label}",status="200"' in http.get("/metrics").text


def test_head_of_what_only_takes_posts_is_refused(http: httpx.Client) -> None:
    assert http.head("/v1/completions").status_code == 405


def test_metrics_count_what_was_done(http: httpx.Client) -> None:
    before = series(http.get("/metrics").text)
    for stream in (False, True):
        http.post(
            "/v1/completions", json={"prompt": "import os", "max_tokens": 6, "ignore_eos": True, "stream": stream}
        )
    after = series(http.get("/metrics").text)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert after["raypp_engine_up"] == 1
    assert grown("raypp_generated_tokens_total") == 12
    assert grown("raypp_request_seconds_count") == 2
    assert grown("raypp_time_to_first_token_seconds_count") == 2
    assert grown("raypp_queue_seconds_count") == 2
    assert grown("raypp_time_per_output_token_seconds_count") == 2
    assert 0 < grown("raypp_time_per_output_token_seconds_sum") < grown("raypp_request_seconds_sum")
    assert grown("raypp_request_output_tokens_sum") == 12
    assert 0 < grown("raypp_inter_token_seconds_count") <= 10  # a late look sees two tokens at once
    assert grown("raypp_requests_finished_total|reason=length") == 2
    assert grown("raypp_http_responses_total|route=/v1/completions|status=200") == 2
    assert after["raypp_requests_running"] == after["raypp_requests_waiting"] == 0
    for name in ("preemptions_total", "prefix_hit_tokens_total", "draft_tokens_total", "kv_usage_ratio"):
        assert f"raypp_{name}" in after


def test_the_process_is_told_of(http: httpx.Client) -> None:
    seen = series(http.get("/metrics").text)
    assert 50 << 20 < seen["process_resident_memory_bytes"] < 64 << 30
    assert 0 < seen["process_open_fds"] <= seen["process_max_fds"]
    assert 0 < seen["process_start_time_seconds"] < time.time()
    sum(range(1_000_000))
    assert series(http.get("/metrics").text)["process_cpu_seconds_total"] >= seen["process_cpu_seconds_total"] > 0


def test_load_is_what_runs_and_waits() -> None:
    with (
        running_app(stage_factory=FakeStage(step_ms=20), num_stages=1, max_num_seqs=1) as app,
        httpx.Client(base_url=app.url, timeout=60) as http,
    ):
        assert http.get("/load").json() == {"server_load": 0}
        body = {"prompt": ["a", "b"], "max_tokens": 200, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            assert httpx.get(f"{app.url}/load").json() == {"server_load": 2}
        app.wait_until(lambda: httpx.get(f"{app.url}/load").json() == {"server_load": 0}, "nothing is left")


def test_control_routes_are_there_where_that_is_asked_for(http: httpx.Client) -> None:
    assert http.post("/reset_prefix_cache").status_code == http.get("/server_info").status_code == 404
    settings = {"control_routes": True, "api_keys": ["k"]}
    with running_app(settings, block_size=16) as app, httpx.Client(base_url=app.url, timeout=60) as client:
        assert client.post("/reset_prefix_cache").status_code == client.get("/server_info").status_code == 401
        client.headers["X-API-Key"] = "k"

        def num_cached(salt: str | None) -> int:
            body = {"prompt": list(range(40)), "max_tokens": 1, "cache_salt": salt}
            usage = client.post("/v1/completions", json=body).json()["usage"]
            return int((usage["prompt_tokens_details"] or {"cached_tokens": 0})["cached_tokens"])

        for salt in (None, "mine"):
            assert [num_cached(salt), num_cached(salt)] == [0, 32]
        assert client.post("/reset_prefix_cache").json() == {"num_replicas": 1}
        for salt in (None, "mine"):
            assert [num_cached(salt), num_cached(salt)] == [0, 32]
        info = client.get("/server_info").json()
        assert (info["version"], info["config"]["model"]["model"]) == (raypp.__version__, "tiny")
        assert len(info["plan"]["stages"]) == 2


def test_series_have_vllms_names_where_that_is_asked_for(http: httpx.Client) -> None:
    assert "vllm:" not in http.get("/metrics").text
    with running_app({"vllm_metrics": True}) as app, httpx.Client(base_url=app.url, timeout=60) as client:
        client.post("/v1/completions", json={"prompt": "import os", "max_tokens": 6, "ignore_eos": True})
        families = {family.name: family for family in text_string_to_metric_families(client.get("/metrics").text)}
    assert {f"vllm:{name}" for names in VLLM_NAMES.values() for name in names} <= families.keys()
    [tokens] = families["vllm:generation_tokens"].samples
    assert (tokens.name, tokens.value) == ("vllm:generation_tokens_total", 6)
    assert tokens.labels == {"model_name": "tiny", "engine": "test"}
    [ended] = families["vllm:request_success"].samples
    assert (ended.labels["finished_reason"], ended.value) == ("length", 1)
    assert families["vllm:e2e_request_latency_seconds"].type == "histogram"
    for name, (vllm_name, *_) in VLLM_NAMES.items():
        assert [s.value for s in families[name].samples] == [s.value for s in families[f"vllm:{vllm_name}"].samples]


def test_rays_metrics_are_those_of_the_exposition(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, list[tuple[float, tuple[str, ...]]]] = {}

    class Instrument:
        def __init__(self, name: str, what: str, tag_keys: tuple[str, ...]) -> None:
            assert what
            self.name, self.tag_keys = name, tag_keys

        def inc(self, value: float, tags: dict[str, str]) -> None:
            assert tuple(tags) == self.tag_keys
            told.setdefault(self.name, []).append((value, tuple(tags.values())))

        set = inc

    monkeypatch.setattr(replica, "Counter", Instrument)
    monkeypatch.setattr(replica, "Gauge", Instrument)
    metrics = EngineMetrics("tiny", "a")
    view, mirror = metrics.view(), replica.RayMetrics()

    def stats(num_steps: int) -> dict[str, object]:
        return {"num_steps": num_steps, "num_running": 3, "active_s": 0.0, "stages": []}

    def tell(num_steps: int) -> dict[str, list[tuple[float, tuple[str, ...]]]]:
        told.clear()
        mirror.tell(view.look(stats(num_steps)).collect())
        return told

    metrics.count_end("stop", 2)
    first = tell(10)
    assert first["raypp_steps_total"] == [(10, ("tiny", "a"))]
    assert first["raypp_requests_finished_total"] == [(2, ("tiny", "a", "stop"))]
    assert first["raypp_requests_running"] == [(3, ("tiny", "a"))]
    exposed = {
        sample.name
        for family in text_string_to_metric_families(metrics.exposition(stats(10)))
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
    assert exposed - set(first) == {"raypp_active_seconds_total"}, "one declaration for both; what is 0 is not told"
    assert set(first) <= exposed
    metrics.count_end("stop")
    second = tell(25)
    assert second["raypp_steps_total"] == [(15, ("tiny", "a"))], "only what is new"
    assert second["raypp_requests_finished_total"] == [(1, ("tiny", "a", "stop"))]
    assert second["raypp_requests_running"] == [(3, ("tiny", "a"))]
    assert "raypp_steps_total" not in tell(25)
    assert tell(4)["raypp_steps_total"] == [(4, ("tiny", "a"))], "an engine that was started again counts from zero"


def test_shares_are_since_the_viewers_own_last_look() -> None:
    metrics = EngineMetrics("tiny", "a")
    first, second = metrics.view(), metrics.view()

    def bubble(registry: CollectorRegistry) -> float | None:
        return registry.get_sample_value("raypp_bubble_ratio", {"model": "tiny", "replica": "a"})

    def stats(active_s: float, busy_s: float) -> dict[str, object]:
        return {"active_s": active_s, "stages": [{"busy_s": busy_s, "copy_wait_s": 0.0}]}

    first.look(stats(10, 10))
    second.look(stats(10, 10))
    assert bubble(second.look(stats(20, 10))) == 1
    assert bubble(first.look(stats(30, 20))) == 0.5


def test_busy_shares_reach_the_metrics(app: RunningApp, http: httpx.Client) -> None:
    http.post("/v1/completions", json={"prompt": "import os", "max_tokens": 60, "ignore_eos": True})
    app.wait_until(lambda: sum(stage["num_steps"] for stage in app.stats()["stages"]) >= 120, "all steps are reported")
    seen = series(http.get("/metrics").text)
    assert seen["raypp_stage_busy_seconds_total|stage=0"] > 0
    assert 0 < seen["raypp_stage_busy_ratio|stage=1"] <= 1
    assert 0 <= seen["raypp_bubble_ratio"] < 1


def test_busy_shares_are_of_the_active_time() -> None:
    before = {"active_s": 10.0, "stages": [{"busy_s": 4.0}, {"busy_s": 5.0}]}
    after = {"active_s": 12.0, "stages": [{"busy_s": 5.0}, {"busy_s": 7.0}]}
    assert busy_shares(before, after) == ([0.5, 1.0], 0.25)
    assert busy_shares(after, after) is None
    # A restarted engine begins at 0, and may have more stages.
    more = {"active_s": 4.0, "stages": [{"busy_s": 1.0}, {"busy_s": 2.0}, {"busy_s": 3.0}]}
    assert busy_shares(after, more) == ([0.25, 0.5, 0.75], 0.5)
    assert busy_shares(after, before) == busy_shares({}, before)
    assert busy_shares({}, before) == ([0.4, 0.5], pytest.approx(0.55))


def test_expositions_of_replicas_are_merged() -> None:
    replicas = [EngineMetrics("tiny", name) for name in ("a", "b")]
    for count, metrics in enumerate(replicas, 1):
        for _ in range(count):
            metrics.count_end("stop")
    families = {
        family.name: family
        for family in text_string_to_metric_families(merge([metrics.exposition({}) for metrics in replicas]))
    }
    samples = families["raypp_requests_finished"].samples
    assert [(sample.labels["replica"], sample.value) for sample in samples] == [("a", 1.0), ("b", 2.0)]
    assert {sample.value for sample in families["raypp_engine_up"].samples} == {0.0}


def test_an_engine_that_is_started_again_is_told_everywhere_and_its_streams_go_on() -> None:
    body = {"prompt": "x", "max_tokens": 150, "ignore_eos": True, "temperature": 0.0}
    with (
        running_app({"live_period_s": 0.02}, num_stages=1, heartbeat_s=0.05) as app,
        httpx.Client(base_url=app.url, timeout=30) as http,
        ThreadPoolExecutor(2) as pool,
    ):
        expected = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        engine, may_start = app.context.llm._engine.handle, threading.Event()
        start_next = engine._supervisor._start_next
        engine._supervisor._start_next = lambda: (may_start.wait(30), start_next())[1]
        with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
            first = next(lines)
            engine.kill_stage(0)
            app.wait_until(lambda: app.context.llm.is_recovering, "the app hears of it")
            assert (http.get("/health").status_code, http.get("/health").json()) == (200, {"status": "recovering"})
            assert (http.head("/ping").status_code, http.get("/v1/models").status_code) == (200, 200)
            ready = http.get("/ready")
            assert (ready.status_code, ready.json()["error"]["code"]) == (503, "recovering")
            assert int(ready.headers["retry-after"]) >= 1
            seen = series(http.get("/metrics").text)
            assert (seen["raypp_engine_up"], seen["raypp_requests_waiting"]) == (0, 1)
            assert seen["raypp_engine_paused_seconds_total"] > 0
            frame = json.loads(http.get("/live", params={"frames": 1}).text.removeprefix("data: "))
            assert (frame["is_recovering"], frame["recoveries"]["count"]) == (True, 0)
            waiting = pool.submit(httpx.post, f"{app.url}/v1/completions", json=body, timeout=30)
            app.wait_until(lambda: app.stats()["num_waiting"] == 2, "a new request waits, too")
            may_start.set()
            *rest, last = lines
        assert last == "[DONE]"
        assert "".join(json.loads(line)["choices"][0]["text"] for line in (first, *rest)) == expected
        assert waiting.result().json()["choices"][0]["text"] == expected
        assert (http.get("/health").json(), http.get("/ready").json()) == ({"status": "ok"}, {"status": "ready"})
        seen = series(http.get("/metrics").text)
        assert seen["raypp_engine_up"] == seen["raypp_engine_restarts_total"] == 1
        assert seen["raypp_requests_carried_over_total"] == 2
        assert 0 < seen["raypp_engine_paused_seconds_total"] < 30
        assert seen["raypp_requests_finished_total|reason=length"] == 3
        assert "raypp_requests_finished_total|reason=error" not in seen


def test_a_dead_engine_is_told_everywhere() -> None:
    with running_app(num_stages=1, max_engine_restarts=0) as app, httpx.Client(base_url=app.url, timeout=30) as http:
        body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            app.context.llm._engine.handle.kill_stage(0)
            rest = [line for line in lines if line]
        assert "stage 0 died" in rest[-1]
        assert rest[-1].startswith('data: {"error":')
        for path in ("/health", "/ping", "/ready", "/v1/models", "/v1/models/tiny"):
            answer = http.get(path)
            assert answer.status_code == 503, path
            assert "stage 0 died" in answer.json()["error"]["message"]
            assert int(answer.headers["retry-after"]) >= 1
        answer = http.post("/v1/completions", json={"prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
        assert int(answer.headers["retry-after"]) >= 1
        seen = series(http.get("/metrics").text)
        assert seen["raypp_engine_up"] == 0
        assert seen["raypp_requests_finished_total|reason=error"] == 2
        assert "raypp_requests_finished_total|reason=abort" not in seen, "a failure is no abort"


def test_the_dashboard_shows_series_that_exist(app: RunningApp, http: httpx.Client) -> None:
    http.post("/v1/completions", json={"prompt": "import os", "max_tokens": 30, "ignore_eos": True})
    app.wait_until(lambda: all(stage["num_steps"] for stage in app.stats()["stages"]), "both stages have reported")
    there = {name.split("|")[0] for name in series(http.get("/metrics").text)}
    dashboard = json.loads((Path(__file__).parents[3] / "configs/grafana.json").read_text())
    shown = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"raypp_\w+", target["expr"])
    }
    assert len(shown) > 10
    assert shown <= there

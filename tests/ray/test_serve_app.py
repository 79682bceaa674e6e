"""The running app as its users meet it: the official `openai` client, load, several replicas, a stage that is killed.

LOAD_CLIENTS and LOAD_SECONDS set the size of the load: 200 and 60 are the full size.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import ray
from openai_tools import check_named_tool_and_none, check_parse, check_tools
from ray import serve
from serve_load import engine_processes, run_load
from serving import deploy, free_port, metric, serving, wait_for
from sizes import IS_FULL
from test_serve_place import certificate

from raypp.config.engine_config import EngineConfig
from raypp.config.http_settings import HttpAddress, HttpSettings
from raypp.errors import ConfigError
from serve_app.run import run_server

pytestmark = pytest.mark.ray

NUM_CLIENTS = int(os.environ.get("LOAD_CLIENTS", "24"))
SECONDS = float(os.environ.get("LOAD_SECONDS", "4"))
WAIT_S = 150.0  # for what is expected; only a hang takes this long
UNHEALTHY_S = 2.0
HEALTH_LIMIT_S = 5.0  # for /health to answer, whatever happens: its own limit is one second, the machine adds to it
HELLO: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def url(local_ray: None) -> Iterator[str]:
    with serving() as url:
        deploy({"num_stages": 2, "max_num_seqs": 64, "kv_cache_bytes": 32 << 20, "max_engine_restarts": 1})
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=WAIT_S) as client:
        yield client


def test_the_sync_client(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "raypp"
    chat = client.chat.completions.create(
        model="tiny", messages=HELLO, max_completion_tokens=12, temperature=0, seed=1, extra_body={"ignore_eos": True}
    )
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 12
    assert (chat.choices[0].finish_reason, chat.choices[0].message.role) == ("length", "assistant")
    stream = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_completion_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == chat.choices[0].message.content
    assert chunks[-1].usage == chat.usage or chunks[-1].usage.completion_tokens == 12  # the prefix is cached by now
    text = client.completions.create(
        model="tiny", prompt="def main(", max_tokens=20, temperature=0, stop=["\n"], echo=True
    )
    assert text.choices[0].text.startswith("def main(")
    assert text.choices[0].finish_reason == "stop"
    pieces = client.completions.create(model="tiny", prompt="def main(", max_tokens=8, temperature=0, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces)


def test_the_async_client_with_many_streams(url: str) -> None:
    async def body() -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=WAIT_S) as client:

            async def one(index: int) -> tuple[str, str]:
                messages: list[openai.types.chat.ChatCompletionMessageParam] = [
                    {"role": "user", "content": f"question {index}"}
                ]
                whole = await client.chat.completions.create(
                    model="tiny", messages=messages, max_tokens=10, temperature=0
                )
                stream = await client.chat.completions.create(
                    model="tiny", messages=messages, max_tokens=10, temperature=0, stream=True
                )
                streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
                return whole.choices[0].message.content or "", streamed

            for whole, streamed in await asyncio.gather(*(one(index) for index in range(12))):
                assert whole == streamed

    asyncio.run(body())


def test_the_clients_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="tiny"):
        client.chat.completions.create(model="gpt-4", messages=HELLO)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="tiny", messages=HELLO, temperature=-1)
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    with pytest.raises(openai.BadRequestError, match="no images"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": [picture]}])  # type: ignore


def test_the_clients_helpers_for_forms_and_tools(client: openai.OpenAI) -> None:
    check_parse(client)
    check_tools(client)
    check_named_tool_and_none(client)


def test_a_disconnect_through_the_proxy_frees_the_row(url: str) -> None:
    before = metric(url, "raypp_generated_tokens_total")
    body = {"prompt": "def main(", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with (
        httpx.Client(base_url=url, timeout=WAIT_S) as http,
        http.stream("POST", "/v1/completions", json=body) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
    wait_for(lambda: metric(url, "raypp_requests_running") == 0)
    assert metric(url, "raypp_generated_tokens_total") - before < 1500, "3000 were ordered"
    assert metric(url, "raypp_kv_usage_ratio") == 0


@pytest.mark.full
def test_load(url: str) -> None:
    report = asyncio.run(run_load(url, engine_processes(os.getpid()), NUM_CLIENTS, SECONDS))
    print("\n", report, "\nRSS growth:", {name: round(growth, 4) for name, growth in report.rss_growth.items()})
    assert not report.failures
    assert report.num_done >= NUM_CLIENTS // 2
    assert report.num_left > 0
    assert report.num_refused <= 0.01 * report.num_done
    assert set(report.rss_growth) == {"replica", "driver", "stage", "stage 1"}
    assert not any(report.engine_after.values())
    assert report.num_files_after.keys() == report.num_files_before.keys()
    # Two of Ray's processes may connect at any time, once; a descriptor per stream would be hundreds.
    assert report.num_files_kept <= 2 < NUM_CLIENTS
    if SECONDS >= 60:  # in a shorter run the first seconds, in which buffers find their size, weigh too much
        assert all(growth < 0.05 for growth in report.rss_growth.values())


def test_a_second_server_of_one_cluster_is_refused(url: str) -> None:
    host, port = "127.0.0.1", int(url.rsplit(":", 1)[1])
    second = HttpAddress(host=host, port=port + 1, app_name="second", route_prefix="/second")
    config = EngineConfig.from_flat("tiny")
    for address in (HttpAddress(host=host, port=port), second):
        with pytest.raises(ConfigError, match=f"{host}:{port}"):
            run_server(config, HttpSettings(), address=address, on_ready=print, read_again=lambda: config)
    assert httpx.get(f"{url}/health", timeout=WAIT_S).status_code == 200


def test_ray_shows_the_apps_metrics(url: str) -> None:
    generated = metric(url, "raypp_generated_tokens_total")
    port = ray.nodes()[0]["MetricsExportPort"]

    def shown() -> list[float]:
        lines = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_S).text.splitlines()
        return [
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.startswith("ray_raypp_generated_tokens_total{") and 'model="tiny"' in line
        ]

    assert generated > 0
    wait_for(lambda: shown() == [generated])


@pytest.mark.full
def test_two_replicas_under_a_prefix_share_load_and_metrics(url: str) -> None:
    deploy({"num_stages": 1, "num_replicas": 2, "served_model_name": "pair"}, name="pair", route_prefix="/pair")
    try:
        pair = f"{url}/pair"
        with openai.OpenAI(base_url=f"{pair}/v1", api_key="none", max_retries=0, timeout=WAIT_S) as client:
            for index in range(16):
                client.completions.create(model="pair", prompt=f"import {index}", max_tokens=2)

        def both_tell_of_all() -> bool:  # one that is slow to answer the other is left out
            lines = httpx.get(f"{pair}/metrics", timeout=WAIT_S).text.splitlines()
            served = [float(line.split()[-1]) for line in lines if line.startswith("raypp_request_seconds_count{")]
            num_up = sum(line.startswith("raypp_engine_up{") for line in lines)
            return num_up == len(served) == 2 and sum(served) == 16

        wait_for(both_tell_of_all)
        assert "raypp" in httpx.get(f"{pair}/", timeout=WAIT_S).text
        assert httpx.get(f"{pair}/page/page.js", timeout=WAIT_S).status_code == 200
        check_conversations_stay_and_outlive_a_replica(pair)
    finally:
        serve.delete("pair")


def check_conversations_stay_and_outlive_a_replica(pair: str) -> None:
    """Every turn finds the one before in its replica's cache; when that is killed, the other one goes on."""
    conversations = [[{"role": "system", "content": f"{index} " + "import os; " * 400}] for index in range(4)]
    usage: list[int] = []

    def turn(index: int) -> None:
        messages = [*conversations[index], {"role": "user", "content": "go on"}]
        answer = httpx.post(f"{pair}/v1/chat/completions", json={"messages": messages, "max_tokens": 2}, timeout=WAIT_S)
        assert answer.status_code == 200, answer.text
        conversations[index] = [*messages, answer.json()["choices"][0]["message"]]
        usage.append(answer.json()["usage"]["prompt_tokens"])

    def hit_rate_of_a_turn() -> float:
        names = ("raypp_prefix_hit_tokens_total", "raypp_prefix_query_tokens_total")
        before = [metric(pair, name) for name in names]
        for index in range(len(conversations)):
            turn(index)
        hit, asked = (metric(pair, name) - old for name, old in zip(names, before, strict=True))
        return hit / asked

    assert hit_rate_of_a_turn() < 0.1, "each begins in its own way"
    assert hit_rate_of_a_turn() > 0.9
    assert min(usage) > 800
    killed, _ = serve.get_deployment_handle("engine", "pair").broadcast("processes").results(timeout_s=WAIT_S)
    os.kill(killed["replica"], signal.SIGKILL)
    for index in range(len(conversations)):
        turn(index)
    assert metric(pair, "raypp_engine_up") == 1, "the other one answered, not one in its place"


@pytest.mark.full
def test_a_stage_killed_under_load(url: str) -> None:
    """Once streams only pause. Then restarts are used up: clients hear of it, /health too, and Serve has a new replica.

    What else the machine does only ever adds to the time that takes: the best of a few times counts.
    """
    unhealthy_s: list[float] = []
    while not unhealthy_s or unhealthy_s[-1] >= UNHEALTHY_S:
        assert len(unhealthy_s) < 3, f"/health said so after {unhealthy_s} s"
        unhealthy_s.append(kill_a_stage_under_load(url))


def kill_a_stage() -> None:
    os.kill(serve.get_app_handle("raypp").processes.remote().result()["stages"][1], signal.SIGKILL)


def kill_a_stage_under_load(url: str) -> float:
    """Kill a stage under streams, twice, check everything that follows, and return when /health told of it."""
    ended: list[str] = []

    def stream() -> None:
        body = {"prompt": "def main(", "max_tokens": 3000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=WAIT_S) as answer:
            ended.append([line for line in answer.iter_lines() if line][-1])

    threads = [threading.Thread(target=stream) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_for(lambda: metric(url, "raypp_requests_running") == 4)
    first = engine_processes(os.getpid())
    kill_a_stage()
    wait_for(lambda: metric(url, "raypp_engine_restarts_total") == 1)
    wait_for(lambda: metric(url, "raypp_requests_running") == 4)
    assert not ended
    before = engine_processes(os.getpid())
    assert set(before) == {"replica", "driver", "stage", "stage 1"}
    assert before["replica"] == first["replica"]
    kept = {before["stage"], before["stage 1"]} & {first["stage"], first["stage 1"]}
    assert len(kept) == 1, "the one that lives keeps its weights"
    assert before["driver"] != first["driver"]
    killed = time.monotonic()
    kill_a_stage()

    def status(path: str) -> int:
        try:
            return httpx.get(f"{url}{path}", timeout=1.0).status_code
        except httpx.TimeoutException:
            return 0  # no replica at the moment: Serve keeps the request

    def is_healthy() -> bool:  # told at any time, also while there is no replica
        answer = httpx.get(f"{url}/health", timeout=HEALTH_LIMIT_S)
        assert answer.status_code == 200 or (answer.json()["error"]["code"], "retry-after" in answer.headers) == (
            "unhealthy",
            True,
        )
        return answer.status_code == 200

    wait_for(lambda: not is_healthy())
    unhealthy_s = time.monotonic() - killed
    for thread in threads:
        thread.join(WAIT_S)
    told_s = time.monotonic() - killed
    assert len(ended) == 4
    for line in ended:
        error = json.loads(line.removeprefix("data: "))["error"]
        assert "stage 1" in error["message"]
        assert error["code"] == "engine_dead"
    while not is_healthy():
        # While one still answers for the dead engine, it does not pretend to have a model.
        assert status("/v1/models") != 200 or is_healthy()
        assert time.monotonic() - killed < WAIT_S
    healthy_s = time.monotonic() - killed
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "import", "max_tokens": 4}, timeout=WAIT_S)
    assert answer.status_code == 200
    serves_s = time.monotonic() - killed
    after = engine_processes(os.getpid())
    assert set(after) == set(before)
    assert not set(after.values()) & {before["replica"], before["driver"], before["stage"]}
    print(f"\n/health says so after {unhealthy_s:.2f} s, clients know after {told_s:.2f} s,")
    print(f"healthy again after {healthy_s:.2f} s, serves after {serves_s:.2f} s")
    return unhealthy_s


def kill_the_replica(url: str, ancestor: int) -> None:
    """Kill the process that owns the engine and hosts the app: what it had under way is told, and /health answers."""
    body = {"prompt": "def main(", "max_tokens": 3000, "ignore_eos": True}
    ended: list[httpx.Response] = []

    def post() -> None:
        ended.append(httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT_S))

    waiting = threading.Thread(target=post)
    waiting.start()
    response = {"input": "def main(", "max_output_tokens": 3000, "ignore_eos": True}
    with (
        httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=WAIT_S) as answer,
        httpx.stream("POST", f"{url}/v1/responses", json={**response, "stream": True}, timeout=WAIT_S) as typed_answer,
    ):
        lines, typed_lines = answer.iter_lines(), typed_answer.iter_lines()
        for stream in (lines, typed_lines):
            next(stream)
        wait_for(lambda: metric(url, "raypp_requests_running") == 3)
        os.kill(engine_processes(ancestor)["replica"], signal.SIGKILL)
        last = [line for line in lines if line][-1]
        *_, before, _, last_typed = (line for line in typed_lines if line)
    waiting.join(WAIT_S)
    for error in (json.loads(last.removeprefix("data: "))["error"], ended[0].json()["error"]):
        assert error["code"] == "engine_dead"
    event, event_before = (json.loads(line.removeprefix("data: ")) for line in (last_typed, before))
    assert (event["type"], event["code"]) == ("error", "engine_dead")
    assert event["sequence_number"] == event_before["sequence_number"] + 1
    assert (ended[0].status_code, ended[0].headers["retry-after"]) == (503, "3")
    for method in ("GET", "HEAD"):
        answer = httpx.request(method, f"{url}/health", timeout=HEALTH_LIMIT_S)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "3")


def stop(url: str, process: subprocess.Popen[str]) -> tuple[set[tuple[int, str | None, str]], httpx.TransportError]:
    """Stop a server; return status, Retry-After and Content-Type of its answers, and why there were no more."""
    answers, ends = set(), time.monotonic() + WAIT_S
    new_connections = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(timeout=HEALTH_LIMIT_S, limits=new_connections) as client:  # reads certificates: before the stop
        process.send_signal(signal.SIGTERM)
        while time.monotonic() < ends:
            try:
                answer = client.get(f"{url}/health")
            except httpx.TransportError as error:
                return answers, error
            if answer.status_code == 200 and not answers:
                continue  # the signal is on its way
            answers.add((answer.status_code, answer.headers.get("retry-after"), answer.headers["content-type"]))
            time.sleep(0.05)  # what ends needs the machine, too
    raise AssertionError(f"the server answers {WAIT_S} s after its end: {answers}")


def text_of(url: str) -> str:
    body = {"prompt": "def main(", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    return str(httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT_S).json()["choices"][0]["text"])


def text_across_a_hangup(url: str, process: subprocess.Popen[str]) -> str:
    """Return what a stream yields while the server reads its configuration again, once that has told of it."""
    body = {"prompt": "def main(", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
    pieces = []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=WAIT_S) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                pieces.append(json.loads(line[6:])["choices"][0]["text"])
                if len(pieces) == 5:
                    process.send_signal(signal.SIGHUP)
    assert process.stderr is not None
    while "the engine runs with parallel.num_stages = 2" not in (line := process.stderr.readline()):
        assert line
    return "".join(pieces)


def check_every_route(url: str) -> None:
    """Ask a server that serves `small` with `control_routes` for something of each kind."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=WAIT_S) as client:
        assert [model.id for model in client.models.list()] == ["small"]
        assert client.chat.completions.create(model="small", messages=HELLO, max_tokens=2).usage
        assert list(client.completions.create(model="small", prompt="a", max_tokens=2, stream=True))
        assert client.responses.create(input="hello", max_output_tokens=2).usage
    paths = ("/", "/page/page.js", "/health", "/ready", "/metrics", "/openapi.json", "/tokenizer_info", "/server_info")
    statuses = {path: httpx.get(f"{url}{path}", timeout=WAIT_S).status_code for path in paths}
    assert statuses == dict.fromkeys(paths, 200)
    assert httpx.get(f"{url}/load", timeout=WAIT_S).json() == {"server_load": 0}
    assert httpx.post(f"{url}/reset_prefix_cache", timeout=WAIT_S).json() == {"num_replicas": 1}


def test_the_short_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`raypp serve`: serves until SIGTERM, tells of a killed replica, then ends without a word and leaves nothing.

    SIGHUP makes the engine follow its file. All of it over HTTPS, as behind a proxy that takes a path off.
    """
    port, path = free_port(), tmp_path / "raypp.toml"
    url, files = f"https://127.0.0.1:{port}", certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", files["ssl_certfile"])  # whom the clients here trust
    path.write_text('[model]\nmodel = "tiny"\n[parallel]\nnum_stages = 1\n')
    options = ["--config", str(path), "--port", str(port), "--served-model-name", "small", "--control-routes"]
    options += ["--root-path", "/llm", "--ssl-certfile", files["ssl_certfile"], "--ssl-keyfile", files["ssl_keyfile"]]
    with subprocess.Popen(
        [sys.executable, "-m", "raypp", "serve", *options],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
    ) as process:
        assert process.stderr is not None
        try:
            said = []
            while not any("serving on" in line for line in said):
                line = process.stderr.readline()
                assert line, "".join(said)
                said.append(line)
            assert url in said[-1]
            assert "http://" not in "".join(said)
            check_every_route(url)
            if IS_FULL:
                path.write_text(path.read_text().replace("num_stages = 1", "num_stages = 2"))
                text = text_across_a_hangup(url, process)
                assert text == text_of(url)
                kill_the_replica(url, process.pid)
        finally:
            refusals, last_error = stop(url, process)
            last_words = process.stderr.read()
            assert process.wait(WAIT_S) == 0
    assert "ServeController" not in last_words, last_words
    assert refusals <= {(503, "3", "application/json")}
    assert refusals or isinstance(last_error, httpx.ConnectError), repr(last_error)  # gone before the first request

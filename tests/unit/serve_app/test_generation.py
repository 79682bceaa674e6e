"""The two endpoints that generate, over real HTTP with a real engine in threads."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import httpx
import pytest
from running_app import RunningApp, running_app
from test_status_routes import series

from raypp.openai_api.request_fields import OpenAIModel
from raypp.openai_api.responses import ChatCompletion, ChatLogprobs, Completion, FinishReason, Usage
from raypp.testing import FakeStage


class Delta(OpenAIModel):
    """What a chunk adds to a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """`reasoning_content` by vLLM's newer name."""
    tool_calls: list[dict[str, Any]] | None = None
    function_call: dict[str, Any] | None = None


class ChunkChoice(OpenAIModel):
    """What a chunk adds to one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    """With `return_token_ids` (vLLM)."""


class ChatCompletionChunk(OpenAIModel):
    """A piece of a stream of answers."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    """Seconds since the epoch."""
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    """With `return_token_ids`, in the first chunk (vLLM)."""


GREEDY = {"temperature": 0.0, "ignore_eos": True}
HELLO = [{"role": "user", "content": "hello"}]


def events_of(text: str) -> list[Any]:
    """Return the data of a finished stream, which must end with [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_chat_has_openais_shape(http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 5, **GREEDY})
    assert answer.status_code == 200
    completion = ChatCompletion.model_validate(answer.json())
    assert completion.model == "tiny"
    assert completion.choices[0].finish_reason == "length"
    assert completion.choices[0].message.content
    assert completion.usage.completion_tokens == 5
    assert completion.usage.total_tokens == completion.usage.prompt_tokens + 5


def test_the_models_defaults_hold_for_fields_that_are_left_out(
    app: RunningApp, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app.context.preparer, "_sampling_defaults", {"temperature": 0.0, "max_tokens": 3})
    for url, body in (("/v1/chat/completions", {"messages": HELLO}), ("/v1/completions", {"prompt": "def main("})):
        given = {**body, "ignore_eos": True, "temperature": None}
        short, long = (http.post(url, json={**given, **more}).json() for more in ({}, {"max_tokens": 7}))
        assert [answer["usage"]["completion_tokens"] for answer in (short, long)] == [3, 7]
        assert http.post(url, json=given).json()["choices"] == short["choices"]  # greedy: the same each time


@pytest.mark.parametrize("endpoint", ["chat", "text"])
def test_a_stream_joined_is_the_whole_answer(http: httpx.Client, endpoint: str) -> None:
    if endpoint == "chat":
        url, body = "/v1/chat/completions", {"messages": HELLO, "max_tokens": 24, **GREEDY}
    else:
        url, body = "/v1/completions", {"prompt": "def main(", "max_tokens": 24, **GREEDY}
    whole = http.post(url, json=body).json()
    streamed = http.post(url, json={**body, "stream": True, "stream_options": {"include_usage": True}})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    *chunks, last = events_of(streamed.text)
    shape = ChatCompletionChunk if endpoint == "chat" else Completion
    for chunk in (*chunks, last):
        shape.model_validate(chunk)
        assert chunk["id"] == chunks[0]["id"]
    assert last["choices"] == []
    assert last["usage"] == whole["usage"] | {"prompt_tokens_details": last["usage"]["prompt_tokens_details"]}
    choices = [chunk["choices"][0] for chunk in chunks]
    if endpoint == "chat":
        assert choices[0]["delta"]["role"] == "assistant"
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        assert text == whole["choices"][0]["message"]["content"]
    else:
        assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert all(chunk["usage"] is None for chunk in chunks)


def test_usage_in_every_chunk(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "import", "max_tokens": 4, "stream": True, "stream_options": options, **GREEDY}
    *chunks, last = events_of(http.post("/v1/completions", json=body).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_are_numbered_in_their_order_and_echoed(http: httpx.Client, stream: bool) -> None:
    prompts = ["def main(", "import", "class A"]
    body = {"prompt": prompts, "max_tokens": 3, "echo": True, "stream": stream, **GREEDY}
    answer = http.post("/v1/completions", json=body)
    texts = dict.fromkeys(range(3), "")
    choices = [c for e in events_of(answer.text) for c in e["choices"]] if stream else answer.json()["choices"]
    for choice in choices:
        texts[choice["index"]] += choice["text"]
    alone = [http.post("/v1/completions", json={**body, "prompt": p, "stream": False}).json() for p in prompts]
    assert list(texts.values()) == [one["choices"][0]["text"] for one in alone]
    assert all(text.startswith(prompt) and text != prompt for text, prompt in zip(texts.values(), prompts, strict=True))


def test_token_ids_are_prompts_too(http: httpx.Client) -> None:
    tokens = http.post("/tokenize", json={"prompt": "def main("}).json()["tokens"]
    text = http.post("/v1/completions", json={"prompt": "def main(", "max_tokens": 4, **GREEDY}).json()
    ids = http.post("/v1/completions", json={"prompt": tokens, "max_tokens": 4, "echo": True, **GREEDY}).json()
    assert ids["choices"][0]["text"] == "def main(" + text["choices"][0]["text"]
    both = http.post("/v1/completions", json={"prompt": [tokens, tokens], "max_tokens": 4, **GREEDY}).json()
    assert {choice["text"] for choice in both["choices"]} == {text["choices"][0]["text"]}


@pytest.mark.parametrize("stream", [False, True])
def test_stop_and_seed(http: httpx.Client, stream: bool) -> None:
    body = {"prompt": "def main(", "max_tokens": 40, **GREEDY}
    full = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    stop = full[5:8]
    answer = http.post("/v1/completions", json={**body, "stop": [stop], "stream": stream})
    if stream:
        choices = [c for e in events_of(answer.text) for c in e["choices"]]
        text, last = "".join(c["text"] for c in choices), choices[-1]
    else:
        last = answer.json()["choices"][0]
        text = last["text"]
    assert text == full[: full.index(stop)]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop)
    seeded = {"prompt": "import", "max_tokens": 12, "temperature": 1.0, "seed": 7}
    texts = {http.post("/v1/completions", json=seeded).json()["choices"][0]["text"] for _ in range(3)}
    assert len(texts) == 1


@pytest.mark.parametrize("endpoint", ["chat", "text"])
def test_several_continuations_with_logprobs(http: httpx.Client, endpoint: str) -> None:
    """Streamed in pieces or whole: the same texts, tokens and log-probabilities."""
    body: dict[str, Any] = {"n": 3, "max_tokens": 6, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    if endpoint == "chat":
        url, body = "/v1/chat/completions", body | {"messages": HELLO, "logprobs": True, "top_logprobs": 2}
    else:
        url, body = "/v1/completions", body | {"prompt": "def main(", "logprobs": 2, "echo": True}
    whole = http.post(url, json=body).json()["choices"]
    assert [choice["index"] for choice in whole] == [0, 1, 2]
    assert len({json.dumps(choice["logprobs"]) for choice in whole}) > 1
    streamed: dict[int, list[dict[str, Any]]] = {0: [], 1: [], 2: []}
    for event in events_of(http.post(url, json={**body, "stream": True}).text):
        for choice in event["choices"]:
            streamed[choice["index"]].append(choice)
    for choice in whole:
        pieces = streamed[choice["index"]]
        logprobs = [piece["logprobs"] for piece in pieces]
        if endpoint == "chat":
            assert [entry for of_piece in logprobs for entry in of_piece["content"]] == choice["logprobs"]["content"]
            assert len(choice["logprobs"]["content"]) == 6
            assert all(len(entry["top_logprobs"]) == 2 for entry in choice["logprobs"]["content"])
        else:
            assert "".join(piece["text"] for piece in pieces) == choice["text"]
            for column, values in choice["logprobs"].items():
                assert [value for of_piece in logprobs for value in of_piece[column]] == values
            offsets, tokens = choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"]
            assert choice["logprobs"]["token_logprobs"][0] is None, "nothing precedes the prompt's first token"
            assert all(choice["text"][at:].startswith(token) for at, token in zip(offsets, tokens, strict=True))


def test_vllms_fields_reach_the_engine(http: httpx.Client) -> None:
    base = {"prompt": "def main(", "max_tokens": 8, "temperature": 0.0}
    plain = http.post("/v1/completions", json={**base, "logprobs": 0}).json()["choices"][0]
    token = {"prompt": plain["logprobs"]["tokens"][0], "add_special_tokens": False}
    [first] = http.post("/tokenize", json=token).json()["tokens"]
    for extra in ({"logit_bias": {str(first): -100}}, {"allowed_token_ids": [300, 301]}):
        other = http.post("/v1/completions", json={**base, **extra, "logprobs": 0}).json()["choices"][0]
        assert other["logprobs"]["tokens"][0] != plain["logprobs"]["tokens"][0]
    stopped = http.post("/v1/completions", json={**base, "stop_token_ids": [first]}).json()["choices"][0]
    assert (stopped["finish_reason"], stopped["stop_reason"], stopped["text"]) == ("stop", first, "")
    answer = http.post("/v1/completions", json={**base, "prompt_logprobs": 1}).json()["choices"][0]
    assert answer["prompt_logprobs"][0] is None
    assert len(answer["prompt_logprobs"]) == len(http.post("/tokenize", json={"prompt": "def main("}).json()["tokens"])


@pytest.mark.parametrize("endpoint", ["chat/completions", "completions"])
def test_tokens_come_back_where_they_are_asked_for(http: httpx.Client, endpoint: str) -> None:
    url, is_chat = f"/v1/{endpoint}", endpoint != "completions"
    body = {**({"messages": HELLO} if is_chat else {"prompt": "def main("}), "max_tokens": 6, "temperature": 0}
    [prompt_ids] = [
        http.post("/tokenize", json={k: body[k] for k in ("messages", "prompt") if k in body}).json()["tokens"]
    ]
    plain = http.post(url, json=body).json()
    assert plain["choices"][0]["token_ids"] is None
    answer = http.post(url, json={**body, "return_token_ids": True}).json()
    [choice] = answer["choices"]
    assert (answer if is_chat else choice)["prompt_token_ids"] == prompt_ids
    assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"] == 6
    assert choice | {"token_ids": None, "prompt_token_ids": None} == plain["choices"][0] | {"prompt_token_ids": None}
    events = events_of(http.post(url, json={**body, "return_token_ids": True, "stream": True}).text)
    assert [t for event in events for c in event["choices"] for t in c["token_ids"]] == choice["token_ids"]
    prompts = [part["prompt_token_ids"] for e in events for part in (e, *e["choices"]) if "prompt_token_ids" in part]
    assert prompts == [prompt_ids]


@pytest.mark.parametrize("endpoint", ["chat/completions", "completions"])
def test_tokens_of_logprobs_go_by_their_numbers_where_that_is_asked_for(http: httpx.Client, endpoint: str) -> None:
    """As of vLLM; of the prompt's tokens, too, and in streams."""
    url, is_chat = f"/v1/{endpoint}", endpoint != "completions"
    body: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "return_token_ids": True}
    if is_chat:
        body |= {"messages": HELLO, "logprobs": True, "top_logprobs": 2}
    else:
        body |= {"prompt": "def main(", "logprobs": 2, "echo": True}
    by_text, by_number = (
        http.post(url, json={**body, "return_tokens_as_token_ids": as_ids}).json()["choices"][0]
        for as_ids in (False, True)
    )
    events = events_of(http.post(url, json={**body, "return_tokens_as_token_ids": True, "stream": True}).text)
    streamed = [c["logprobs"] for event in events for c in event["choices"]]
    logprobs = by_number["logprobs"]
    token_ids = by_number["token_ids"] if is_chat else by_number["prompt_token_ids"] + by_number["token_ids"]
    names = [f"token_id:{token_id}" for token_id in token_ids]
    if is_chat:
        assert [entry["token"] for entry in logprobs["content"]] == names
        assert [entry for piece in streamed for entry in piece["content"]] == logprobs["content"]
        assert [e["bytes"] for e in logprobs["content"]] == [e["bytes"] for e in by_text["logprobs"]["content"]]
        alternatives = [[top["token"] for top in entry["top_logprobs"]] for entry in logprobs["content"]]
    else:
        assert logprobs["tokens"] == names
        assert [name for piece in streamed for name in piece["tokens"]] == names
        assert logprobs["text_offset"] == by_text["logprobs"]["text_offset"]
        alternatives = [[*top] for top in logprobs["top_logprobs"] if top is not None]
    assert all(re.fullmatch(r"token_id:\d+", name) for of_one in alternatives for name in of_one)
    assert by_text["text" if not is_chat else "message"] == by_number["text" if not is_chat else "message"]


def test_prompts_of_different_salts_share_no_cache(http: httpx.Client) -> None:
    def num_cached(salt: str | None) -> int:
        body = {"prompt": [*range(300, 320)], "max_tokens": 1, "cache_salt": salt}
        usage = http.post("/v1/completions", json=body).json()["usage"]
        assert usage["prompt_tokens"] == 20
        return usage["prompt_tokens_details"]["cached_tokens"]

    salts = (None, "me", "you")
    assert [num_cached(salt) for salt in salts] == [0, 0, 0]
    assert [num_cached(salt) for salt in salts] == [16, 16, 16]


def test_the_tokenizer_describes_itself(http: httpx.Client) -> None:
    info = http.get("/tokenizer_info").json()
    assert (info["eos_token"], info["bos_token"], info["model_max_length"]) == ("<|im_end|>", None, 256)
    assert "add_generation_prompt" in info["chat_template"]
    [end] = [index for index, token in info["added_tokens_decoder"].items() if token["content"] == "<|im_end|>"]
    assert http.post("/detokenize", json={"tokens": [int(end)]}).json()["prompt"] == info["eos_token"]


def test_what_is_tokenized_is_what_is_read(http: httpx.Client) -> None:
    said = {"messages": [*HELLO, {"role": "assistant", "content": "I am"}]}
    continued = {**said, "add_generation_prompt": False, "continue_final_message": True}
    tokens = http.post("/tokenize", json=continued).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": tokens}).json()["prompt"].endswith("I am")
    answer = http.post("/v1/chat/completions", json={**continued, "max_tokens": 1, "return_token_ids": True}).json()
    assert answer["prompt_token_ids"] == tokens


@pytest.mark.parametrize(
    ("url", "body", "status", "said"),
    [
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/chat/completions", {"messages": HELLO, "temperature": -1}, 400, "temperature"),
        ("/v1/chat/completions", {"messages": HELLO, "tempratur": 1}, 400, "tempratur"),
        ("/v1/chat/completions", {"messages": HELLO, "model": "gpt-9"}, 404, "tiny"),
        (
            "/v1/chat/completions",
            {"messages": HELLO, "response_format": {"type": "json_schema"}},
            400,
            "response_format",
        ),
        ("/v1/chat/completions", {"messages": HELLO, "chat_template_kwargs": {"chat_template": "x"}}, 400, "template"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
            400,
            "no images",
        ),
        ("/v1/completions", {"prompt": ""}, 400, "no tokens"),
        ("/v1/completions", {"prompt": "x " * 4000}, 400, "max_model_len"),
        ("/v1/completions", {"prompt": [999_999]}, 400, "vocabulary"),
        ("/v1/completions", {"prompt": [2**40], "echo": True}, 400, "vocabulary"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": "\ud800"}, 400, "Unicode"),
        ("/v1/completions", {"prompt": "x", "request_id": "a\r\nb"}, 400, "request_id"),
        ("/v1/completions", {"prompt": "x", "request_id": "a\n"}, 400, "request_id"),
        ("/tokenize", {}, 400, "either prompt or messages"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [2**40]}, 400, "vocabulary"),
    ],
)
def test_what_cannot_be_served_says_why(
    http: httpx.Client, url: str, body: dict[str, Any], status: int, said: str
) -> None:
    for extra in ({}, {"stream": True}) if url.startswith("/v1") else ({},):
        content = json.dumps({**body, **extra}).encode()
        answer = http.post(url, content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert said.lower() in error["message"].lower()
        assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("content", [b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"", b"[" * 100_000])
def test_bodies_that_are_no_objects(http: httpx.Client, content: bytes) -> None:
    answer = http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_unknown_paths_and_methods_have_openais_error_shape(http: httpx.Client) -> None:
    assert http.get("/nothing").json()["error"]["code"] == "not_found"
    answer = http.post("/v1/embeddings", json={"input": "a"})
    assert answer.status_code == 404
    message = answer.json()["error"]["message"]
    assert message.startswith("there is nothing at POST /v1/embeddings; there is: POST /v1/chat/completions; ")
    assert "page.css" not in message
    answer = http.get("/v1/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["code"] == "method_not_allowed"


SLOW = {"stage_factory": FakeStage(step_ms=50), "num_stages": 1}
LONG = {"prompt": [1], "max_tokens": 2000, "ignore_eos": True}  # 100 s


@pytest.fixture(scope="module")
def slow_app():
    with running_app({"max_queued_requests": 2, "stream_keep_alive_s": 0.1}, max_num_seqs=2, **SLOW) as app:
        yield app


def wait_until_idle(app: RunningApp) -> dict[str, Any]:
    """Wait until nothing runs or waits, and return the stats."""
    seen: dict[str, Any] = {}

    def is_idle() -> bool:
        seen.update(app.stats())
        return not seen["num_running"] and not seen["num_waiting"]

    app.wait_until(is_idle, "nothing runs or waits")
    return seen


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_frees_its_row(slow_app: RunningApp, stream: bool) -> None:
    before = wait_until_idle(slow_app)["num_generated_tokens"]
    aborts_before = num_aborts(slow_app)
    with httpx.Client(base_url=slow_app.url, timeout=30) as http:
        if stream:
            with running_stream(http):
                pass
        else:
            with pytest.raises(httpx.ReadTimeout):
                http.post("/v1/completions", json=LONG, timeout=0.3)
    after = wait_until_idle(slow_app)
    # A loaded machine may be some seconds late to tell the server.
    assert after["num_generated_tokens"] - before < 150, "2000 were ordered"
    assert after["num_free_blocks"] == after["num_blocks"] - 1
    assert slow_app.context.admission.num_unfinished == 0
    assert num_aborts(slow_app) == aborts_before + 1


def num_aborts(app: RunningApp) -> float:
    return series(app.context.metrics.exposition({})).get("raypp_requests_finished_total|reason=abort", 0.0)


@contextmanager
def running_stream(http: httpx.Client, **body: Any) -> Iterator[None]:
    """Have a long stream under way; disconnect in the end."""
    with http.stream("POST", "/v1/completions", json={**LONG, **body, "stream": True}) as answer:
        lines = answer.iter_lines()  # dropping it would end the response
        next(line for line in lines if line.startswith("data: "))
        yield


def test_a_waiting_client_that_disconnects_leaves_the_queue(slow_app: RunningApp) -> None:
    wait_until_idle(slow_app)
    with httpx.Client(base_url=slow_app.url, timeout=30) as http, running_stream(http), running_stream(http):
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json=LONG, timeout=0.5)
        slow_app.wait_until(lambda: not slow_app.stats()["num_waiting"], "it has left the queue")
        assert slow_app.stats()["num_running"] == 2
    wait_until_idle(slow_app)


def test_a_stream_that_waits_begins_and_is_kept_alive(slow_app: RunningApp) -> None:
    """Its status and comments come while others have all rows; its text when they have gone."""
    wait_until_idle(slow_app)
    with httpx.Client(base_url=slow_app.url, timeout=30) as http, contextlib.ExitStack() as waiting:
        with running_stream(http), running_stream(http):
            body = {**LONG, "max_tokens": 2, "stream": True}
            answer = waiting.enter_context(http.stream("POST", "/v1/completions", json=body))
            assert answer.status_code == 200
            lines = answer.iter_lines()
            assert [next(lines) for _ in range(4)] == [": waiting", ""] * 2
            slow_app.wait_until(lambda: slow_app.stats()["num_waiting"] == 1, "it waits in the engine")
            refused = http.post("/v1/completions", json={**LONG, "prompt": [[1], [1]], "stream": True})
            assert refused.status_code == 429
        rest = [line for line in lines if line.startswith("data: ")]
    assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert rest[-1] == "data: [DONE]"
    wait_until_idle(slow_app)


def test_a_waiting_stream_that_disconnects_leaves_the_queue(slow_app: RunningApp) -> None:
    wait_until_idle(slow_app)
    with httpx.Client(base_url=slow_app.url, timeout=30) as http, running_stream(http), running_stream(http):
        with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
            lines = answer.iter_lines()  # dropping it would end the response
            next(lines)
            slow_app.wait_until(lambda: slow_app.stats()["num_waiting"] == 1, "it waits in the engine")
        slow_app.wait_until(lambda: not slow_app.stats()["num_waiting"], "it has left the queue")
    wait_until_idle(slow_app)


def test_requests_of_one_name_run_side_by_side(slow_app: RunningApp) -> None:
    """Names are the clients' own: two of them may choose the same."""
    wait_until_idle(slow_app)
    with (
        httpx.Client(base_url=slow_app.url, timeout=30) as http,
        running_stream(http, request_id="mine"),
        running_stream(http, request_id="mine"),
    ):
        assert slow_app.stats()["num_running"] == 2
    wait_until_idle(slow_app)


def test_the_given_name_is_returned(http: httpx.Client) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    assert http.post("/v1/completions", json={**body, "request_id": "mine"}).json()["id"] == "cmpl-mine"
    named = {"X-Request-Id": "of-a-proxy"}
    assert http.post("/v1/completions", json=body, headers=named).json()["id"] == "cmpl-of-a-proxy"
    assert http.post("/v1/completions", json={**body, "request_id": "mine"}, headers=named).json()["id"] == "cmpl-mine"
    chat = {"messages": HELLO, "max_tokens": 1, "stream": True}
    [first, *_] = events_of(http.post("/v1/chat/completions", json=chat, headers=named).text)
    assert first["id"] == "chatcmpl-of-a-proxy"
    ids = {http.post("/v1/completions", json=body, headers={"X-Request-Id": "x" * 200}).json()["id"] for _ in range(2)}
    assert len(ids) == 2, "no name for an id: too long"


def test_replicas_of_one_engine_draw_different_seeds() -> None:
    body = {"prompt": "def main(", "max_tokens": 30, "temperature": 1.0, "ignore_eos": True}
    texts = []
    for replica in ("a", "b"):
        with running_app(replica=replica, num_stages=1) as app, httpx.Client(base_url=app.url, timeout=30) as http:
            texts.append(http.post("/v1/completions", json=body).json()["choices"][0]["text"])
    assert texts[0] != texts[1]


def test_answers_that_are_not_streamed_are_not_looked_at_before_their_end(app: RunningApp, http: httpx.Client) -> None:
    def num_looks() -> float:
        return series(app.context.metrics.exposition({}))["raypp_inter_token_seconds_count"]

    body = {"max_tokens": 20, **GREEDY}
    before = num_looks()
    for prompt in ("x", ["x", "y"]):
        assert http.post("/v1/completions", json={**body, "prompt": prompt}).status_code == 200
    assert num_looks() == before
    http.post("/v1/completions", json={**body, "prompt": "x", "stream": True})
    assert num_looks() > before


def test_a_full_queue_is_told_with_retry_after(slow_app: RunningApp) -> None:
    wait_until_idle(slow_app)
    with httpx.Client(base_url=slow_app.url, timeout=30) as http, running_stream(http, prompt=[[1], [2]]):
        answer = http.post("/v1/completions", json={**LONG, "prompt": [[1], [2], [3]]})
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "queue_full"
        assert http.get("/health").status_code == 200
    wait_until_idle(slow_app)

"""Pictures over HTTP, as OpenAI's clients send them; what is wrong with one is the matter of its request alone."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from PIL import Image, ImageDraw
from running_app import running_app
from test_generation import events_of

GREEDY = {"temperature": 0.0, "max_tokens": 16}
TEXT = {"type": "text", "text": "What is in the picture?"}


@pytest.fixture(scope="module")
def app() -> Iterator[Any]:
    with running_app(model="tiny-vl", num_stages=2) as running:
        yield running


@pytest.fixture(scope="module")
def http(app: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=app.url, timeout=60) as client:
        yield client


def picture(colour: str = "red", size: tuple[int, int] = (120, 90)) -> bytes:
    image = Image.new("RGB", size, "white")
    ImageDraw.Draw(image).rectangle((20, 20, 60, 60), fill=colour)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}"}}


def ask(http: httpx.Client, *parts: dict[str, Any], **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": [*parts, TEXT]}]
    return http.post("/v1/chat/completions", json={"messages": messages, **GREEDY, **fields})


def test_a_picture_is_answered_at_once_and_as_a_stream(http: httpx.Client) -> None:
    answer = ask(http, part(picture()))
    assert answer.status_code == 200
    body = answer.json()
    text = body["choices"][0]["message"]["content"]
    assert text
    alone = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": [TEXT]}], **GREEDY})
    assert 20 <= body["usage"]["prompt_tokens"] - alone.json()["usage"]["prompt_tokens"] <= 40
    chunks = events_of(ask(http, part(picture()), stream=True).text)
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == text


def test_a_response_sees_the_picture_that_a_chat_sees(http: httpx.Client) -> None:
    image = {"type": "input_image", "detail": "auto", "image_url": part(picture())["image_url"]["url"]}

    def respond(*parts: dict[str, Any]) -> httpx.Response:
        content = [*parts, {"type": "input_text", "text": TEXT["text"]}]
        body = {"input": [{"role": "user", "content": content}], "max_output_tokens": 16, "temperature": 0.0}
        return http.post("/v1/responses", json=body)

    response, chat = respond(image).json(), ask(http, part(picture())).json()
    assert response["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert response["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    broken = respond({**image, "image_url": part(b"no image")["image_url"]["url"]})
    assert (broken.status_code, broken.json()["error"]["param"]) == (400, "input")


def test_a_message_sees_the_picture_that_a_chat_sees(http: httpx.Client) -> None:
    def ask_for_message(data: bytes) -> httpx.Response:
        source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}
        messages = [{"role": "user", "content": [{"type": "image", "source": source}, TEXT]}]
        return http.post("/v1/messages", json={"messages": messages, **GREEDY})

    message, chat = ask_for_message(picture()).json(), ask(http, part(picture())).json()
    [block] = message["content"]
    assert (block["type"], block["text"]) == ("text", chat["choices"][0]["message"]["content"])
    usage = message["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
    broken = ask_for_message(b"no image")
    assert broken.status_code == 400
    assert broken.json()["error"]["message"].startswith("messages: ")


def test_the_model_says_that_it_takes_images_and_counts_their_tokens(http: httpx.Client) -> None:
    assert http.get("/v1/models").json()["data"][0]["takes_images"] is True
    messages = [{"role": "user", "content": [part(picture()), TEXT]}]
    counted = http.post("/tokenize", json={"messages": messages}).json()["count"]
    assert counted == ask(http, part(picture())).json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (part(b"no image"), "not an image"),
        (part(picture()[:100]), "broken or truncated"),
        ({"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest/meta-data"}}, "not allowed"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "address"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,raw"}}, "base64"),
        (part(picture(size=(1, 1000))), "aspect ratio"),
    ],
)
def test_a_bad_picture_is_refused_beside_good_ones(http: httpx.Client, bad: dict[str, Any], words: str) -> None:
    good = ask(http, part(picture("blue"))).json()["choices"][0]["message"]["content"]
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda p: ask(http, p), [part(picture("blue")), bad, part(picture("blue"))]))
    assert [answer.status_code for answer in answers] == [200, 400, 200]
    assert words in answers[1].json()["error"]["message"]
    assert {answers[i].json()["choices"][0]["message"]["content"] for i in (0, 2)} == {good}


def test_pictures_that_need_more_tokens_than_the_context(http: httpx.Client) -> None:
    answer = ask(http, *[part(picture())] * 12)
    assert answer.status_code == 400
    assert "max_model_len" in answer.json()["error"]["message"]

"""Keys, sizes and origins."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from running_app import RunningApp, running_app

from serve_app.http_app import OPEN_PATHS

BODY = {"prompt": "x", "max_tokens": 1}


@pytest.fixture(scope="module")
def guarded() -> Iterator[RunningApp]:
    settings = {"api_keys": ["first", "second"], "cors_origins": ["https://good.example"], "max_body_bytes": 2000}
    with running_app(settings, num_stages=1) as app:
        yield app


@pytest.fixture
def door(guarded: RunningApp) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=guarded.url, timeout=30) as client:
        yield client


@pytest.mark.parametrize("authorization", [None, "Bearer wrong", "Basic first", "Bearer", "first", "Bearer first2"])
def test_without_a_valid_key_nothing_is_served(door: httpx.Client, authorization: str | None) -> None:
    headers = {} if authorization is None else {"Authorization": authorization}
    for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/live"), ("POST", "/tokenize")):
        answer = door.request(method, path, json=BODY if method == "POST" else None, headers=headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("key", ["first", "second"])
def test_every_key_opens(door: httpx.Client, key: str) -> None:
    answer = door.post("/v1/completions", json=BODY, headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 200


def test_monitors_and_the_page_need_none(door: httpx.Client) -> None:
    assert {door.get(path).status_code for path in OPEN_PATHS} == {200}


def test_the_description_says_that_keys_are_needed(door: httpx.Client) -> None:
    description = door.get("/openapi.json").json()
    assert description["paths"]["/v1/completions"]["post"]["security"] == [{"HTTPBearer": []}]


@pytest.mark.parametrize("announced", [True, False])
def test_large_bodies_are_refused(door: httpx.Client, announced: bool) -> None:
    content = b'{"prompt": "' + b"x" * 5000 + b'"}'
    headers = {"Authorization": "Bearer first", "Content-Type": "application/json"}
    answer = door.post("/v1/completions", content=content if announced else iter([content]), headers=headers)
    assert answer.status_code == 413
    assert "2000 bytes" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("origin", "allowed"), [("https://good.example", True), ("https://bad.example", False)])
def test_only_named_origins_may_call(door: httpx.Client, origin: str, allowed: bool) -> None:
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    answer = door.options("/v1/completions", headers=headers)
    assert ("access-control-allow-origin" in answer.headers) == allowed


def test_without_settings_no_origin_may_call(http: httpx.Client) -> None:
    answer = http.get("/version", headers={"Origin": "https://good.example"})
    assert "access-control-allow-origin" not in answer.headers

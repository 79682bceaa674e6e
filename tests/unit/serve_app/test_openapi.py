"""The app does what its OpenAPI description says: every route is in it, and no generated request finds a gap.

TEST_SCHEMA_EXAMPLES sets the number of valid examples an operation, of which few are served, and a third as many are
invalid; they are others at each run. Of few generated requests by chance none may be served or refused: one that
is known to be comes after them. An operation without input has only one example.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from running_app import RunningApp, running_app
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks
from starlette.routing import BaseRoute

from raypp.testing import FakeStage

NUM_EXAMPLES = int(os.environ.get("TEST_SCHEMA_EXAMPLES", "9"))

load_all_checks()
PROMISES = CHECKS.get_by_names(
    [
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_headers_conformance",
        "response_schema_conformance",
    ]
)


@pytest.fixture(scope="module")
def small_app() -> Iterator[RunningApp]:
    """An engine whose requests are short, whatever they ask for."""
    with running_app(
        {"max_body_bytes": 1 << 20, "control_routes": True},
        num_stages=1,
        max_model_len=48,
        stage_factory=FakeStage(step_ms=0.0),
    ) as app:
        yield app


@pytest.fixture(scope="module")
def api(small_app: RunningApp) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_url(f"{small_app.url}/openapi.json", timeout=60)


OPERATIONS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/tokenizer_info"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("GET", "/health"),
    ("GET", "/ping"),
    ("GET", "/ready"),
    ("GET", "/load"),
    ("POST", "/reset_prefix_cache"),
    ("GET", "/server_info"),
    ("GET", "/version"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/"),
    ("GET", "/page/{name}"),
    ("GET", "/live"),
]


def paths_of(routes: list[BaseRoute], prefix: str = "") -> set[str]:
    found = set()
    for route in routes:
        inner = getattr(route, "routes", None) or getattr(getattr(route, "original_router", None), "routes", [])
        found |= paths_of(inner, prefix) if inner else {prefix + route.path}  # type: ignore[attr-defined]
    return found


def test_every_route_is_described(small_app: RunningApp) -> None:
    description = httpx.get(f"{small_app.url}/openapi.json").json()
    described = {(method.upper(), path) for path, methods in description["paths"].items() for method in methods}
    assert described == set(OPERATIONS)
    assert {path for _, path in described} == {path.replace(":path}", "}") for path in paths_of(small_app.app.routes)}
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            assert operation["summary"], f"{method} {path}"
            assert all(response["description"] for response in operation["responses"].values()), f"{method} {path}"


NO_INPUT = {"/reset_prefix_cache"}

MESSAGES = [{"role": "user", "content": "Hi"}]

SERVED_BODIES = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1, 2]},
}

# What has no input (or a path, in which everything is a name) cannot be asked in a wrong way.
MODES = [(*operation, GenerationMode.POSITIVE) for operation in OPERATIONS] + [
    (method, path, GenerationMode.NEGATIVE)
    for method, path in OPERATIONS
    if path == "/live" or (method == "POST" and path not in NO_INPUT)
]


@pytest.mark.parametrize(
    ("method", "path", "mode"), MODES, ids=[f"{method} {path} {mode.value}" for method, path, mode in MODES]
)
def test_no_request_finds_a_gap(
    small_app: RunningApp, api: schemathesis.BaseSchema, method: str, path: str, mode: GenerationMode
) -> None:
    statuses: Counter[int] = Counter()
    num_examples = NUM_EXAMPLES if mode == GenerationMode.POSITIVE else max(5, NUM_EXAMPLES // 3)
    with requests.Session() as session:

        @settings(
            max_examples=num_examples,
            deadline=None,
            derandomize="TEST_SCHEMA_EXAMPLES" not in os.environ,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=api[path][method].as_strategy(generation_mode=mode))
        def call(case: schemathesis.Case) -> None:
            if path == "/live":  # the one request that is meant never to end
                frames = str((case.query or {}).get("frames", "1"))
                case.query = {**(case.query or {}), "frames": "1" if frames.isdigit() and frames != "0" else frames}
            if isinstance(case.body, dict) and mode == GenerationMode.POSITIVE:
                case.body.pop("model", None)  # few examples would hit upon its name
            statuses[case.call_and_validate(checks=PROMISES, session=session, timeout=30).status_code] += 1

        call()
        print(f"\n{method} {path} {mode.value}: {dict(statuses)}")
        if mode == GenerationMode.NEGATIVE:
            known = {"query": {"frames": "0"}} if path == "/live" else {"body": [], "media_type": "application/json"}
        elif path in SERVED_BODIES:
            known = {"body": SERVED_BODIES[path], "media_type": "application/json"}
        else:
            known = None
        if known is not None:
            case = api[path][method].Case(**known)
            statuses = Counter([case.call_and_validate(checks=PROMISES, session=session, timeout=30).status_code])
    assert statuses[404 if "{" in path else 200 if mode == GenerationMode.POSITIVE else 400]
    assert not small_app.stats()["num_running"]

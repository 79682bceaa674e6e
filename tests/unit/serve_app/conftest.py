"""One server for a module's tests, and clients of it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from running_app import RunningApp, running_app


@pytest.fixture(scope="module")
def app() -> Iterator[RunningApp]:
    with running_app() as app:
        yield app


@pytest.fixture
def http(app: RunningApp) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=app.url, timeout=60) as client:
        yield client

"""The packages themselves, each in an environment of its own, against an app in this process. Minutes: most is pip."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from client_packages import CLIENTS, Environment, RegistryUnreachableError
from recorder import ENGINE
from running_app import RunningApp, running_app


@pytest.fixture(scope="module")
def app() -> Iterator[RunningApp]:
    with running_app(**ENGINE) as app:
        yield app


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_gets_through_with_its_own_code(app: RunningApp, client: str, tmp_path: Path) -> None:
    try:
        environment = Environment(CLIENTS[client], tmp_path)
    except RegistryUnreachableError as error:
        pytest.skip(str(error))
    environment.run(f"{app.url}/v1")

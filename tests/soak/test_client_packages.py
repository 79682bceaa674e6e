"""The packages themselves, each in an environment of its own, against an app in this process. Minutes: most is pip."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from client_packages import CLIENTS, CONFORMANCE, Client, Environment, RegistryUnreachableError
from recorder import ENGINE
from running_app import RunningApp, running_app

pytestmark = pytest.mark.part("clients")


@pytest.fixture(scope="module")
def app() -> Iterator[RunningApp]:
    with running_app(**ENGINE) as app:
        yield app


@pytest.fixture(scope="module")
def picture_app() -> Iterator[RunningApp]:
    with running_app(**{**ENGINE, "model": "tiny-vl", "max_model_len": 2048}) as app:
        yield app


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_gets_through_with_its_own_code(app: RunningApp, client: str, tmp_path: Path) -> None:
    _run(CLIENTS[client], app, tmp_path)


@pytest.mark.parametrize("program", CONFORMANCE)
def test_a_conformance_program_finds_what_it_wants(picture_app: RunningApp, program: str, tmp_path: Path) -> None:
    _run(CONFORMANCE[program], picture_app, tmp_path)


def _run(client: Client, app: RunningApp, folder: Path) -> None:
    try:
        environment = Environment(client, folder)
    except RegistryUnreachableError as error:
        pytest.skip(str(error))
    environment.run(f"{app.url}/v1")

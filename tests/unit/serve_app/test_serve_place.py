"""Where `raypp serve` may serve on a cluster whose Ray Serve runs already: never in another application's place."""

from __future__ import annotations

import pytest

from raypp.config.http_settings import HttpAddress, http_settings
from raypp.errors import ConfigError
from serve_app.running_serve import RunningServe

RUNNING = RunningServe("127.0.0.1", 8000, {"raypp": "/", "other": "/other"})


def at(host: str, port: int, name: str, prefix: str) -> HttpAddress:
    settings = {"host": host, "port": port, "app_name": name, "route_prefix": prefix}
    return http_settings(HttpAddress, settings)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (at("127.0.0.1", 8000, "raypp", "/second"), r"this name.*http://127.0.0.1:8000/.*--app-name"),
        (at("127.0.0.1", 8000, "second", "/"), r"path.*raypp's.*--route-prefix"),
        (at("127.0.0.1", 8001, "second", "/second"), r"127.0.0.1:8001.*127.0.0.1:8000.*--port 8000"),
        (at("0.0.0.0", 8000, "second", "/second"), r"0.0.0.0:8000.*--host 127.0.0.1"),
    ],
)
def test_a_place_that_is_taken_is_refused_with_what_to_do(place: HttpAddress, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        RUNNING.check_place(place.host, place.port, place.app_name, place.route_prefix)


def test_a_second_one_has_a_place_beside_the_first() -> None:
    place = at("127.0.0.1", 8000, "second", "/second")
    RUNNING.check_place(place.host, place.port, place.app_name, place.route_prefix)
    assert place.url == "http://127.0.0.1:8000/second"
    assert at("127.0.0.1", 8000, "raypp", "/").url == "http://127.0.0.1:8000"


@pytest.mark.parametrize(("name", "prefix"), [("", "/"), ("raypp", ""), ("raypp", "x"), ("raypp", "/x/")])
def test_names_and_prefixes_that_cannot_be(name: str, prefix: str) -> None:
    with pytest.raises(ConfigError, match="expected"):
        at("127.0.0.1", 8000, name, prefix)

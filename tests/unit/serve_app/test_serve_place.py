"""Where `raypp serve` may serve on a cluster whose Ray Serve runs already: never in another application's place."""

from __future__ import annotations

import datetime
from dataclasses import replace
from ipaddress import IPv4Address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from ray.serve.config import HTTPOptions

from raypp.config.http_settings import HttpAddress, http_settings
from raypp.errors import ConfigError
from serve_app.running_serve import RunningServe

DAY = datetime.timedelta(days=1)
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


def certificate(folder: Path) -> dict[str, str]:
    """Write a certificate for this machine, and its key; return the settings that name them."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now, now + DAY)
    names = [x509.DNSName("localhost"), x509.IPAddress(IPv4Address("127.0.0.1"))]
    made = made.add_extension(x509.SubjectAlternativeName(names), critical=False)
    plain = (PrivateFormat.PKCS8, NoEncryption())
    (folder / "cert.pem").write_bytes(made.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
    (folder / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, *plain))
    return {"ssl_certfile": str(folder / "cert.pem"), "ssl_keyfile": str(folder / "key.pem")}


def test_serve_is_told_of_certificate_and_root_path(tmp_path: Path) -> None:
    files = certificate(tmp_path)
    address = http_settings(HttpAddress, {**files, "root_path": "/llm"})
    assert address.url == "https://127.0.0.1:8000"
    options = HTTPOptions(**address.of_serve)
    assert (options.ssl_certfile, options.ssl_keyfile) == (files["ssl_certfile"], files["ssl_keyfile"])
    assert options.root_path == "/llm"
    running = replace(RUNNING, options=options.model_dump())
    running.check_options(address.of_serve)
    with pytest.raises(ConfigError, match=r"another root_path; got: ''; expected: '/llm'"):
        running.check_options(at("127.0.0.1", 8000, "second", "/second").of_serve)
    with pytest.raises(ConfigError, match=r"raypp at https://127\.0\.0\.1:8000/;"):
        running.check_place("127.0.0.1", 8000, "raypp", "/")


def test_a_certificate_that_cannot_be_used_is_refused_before_a_start(tmp_path: Path) -> None:
    files = certificate(tmp_path)
    with pytest.raises(ConfigError, match="ssl_certfile alone; expected: both"):
        http_settings(HttpAddress, {"ssl_certfile": files["ssl_certfile"]})
    for wrong in (files["ssl_certfile"], str(tmp_path / "none.pem")):
        with pytest.raises(ConfigError, match="the certificate cannot be used"):
            http_settings(HttpAddress, {**files, "ssl_keyfile": wrong})
    with pytest.raises(ConfigError, match="not a root path"):
        http_settings(HttpAddress, {"root_path": "llm/"})

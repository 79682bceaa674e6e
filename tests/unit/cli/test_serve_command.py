"""`raypp serve`: what the options become. The server itself is tested in tests/ray."""

from __future__ import annotations

import re
import shlex
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import ray
import yaml
from ray.serve.schema import ServeDeploySchema

from raypp.cli.main import EntryPoints, main
from raypp.config.engine_config import EngineConfig
from raypp.config.http_settings import HttpAddress, HttpSettings
from raypp.errors import ConfigError
from raypp.plan import fit
from raypp.plan.hardware import Gpu, Hardware, Machine
from serve_app.app import split_arguments

ROOT = Path(__file__).parents[3]


class FakeServer:
    """Remembers what it was asked to serve."""

    def __init__(self) -> None:
        self.config: EngineConfig | None = None
        self.settings = HttpSettings()
        self.address = HttpAddress()

    def __call__(
        self,
        config: EngineConfig,
        settings: HttpSettings,
        *,
        address: HttpAddress,
        on_ready: Callable[[str], None],
        read_again: Callable[[], EngineConfig],
    ) -> None:
        self.config, self.settings, self.address = config, settings, address
        self.read_again = read_again
        on_ready(address.url)


def test_options_become_settings_and_the_address_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    server = FakeServer()
    options = [
        *("tiny", "--num-stages", "3", "--max-num-seqs", "8"),
        *("--host", "0.0.0.0", "--port", "9000", "--num-replicas", "2", "--max-queued-requests", "5"),
        *("--served-model-name", "a", "--served-model-name", "b", "--api-key-file", "keys"),
        *("--cors-origins", "https://x.example", "--max-body-bytes", "4096"),
    ]
    assert main(["serve", *options], entry_points=EntryPoints(serve=server)) == 0
    assert server.config is not None
    assert (server.config.parallel.num_stages, server.config.scheduler.max_num_seqs) == (3, 8)
    settings = server.settings
    assert (settings.num_replicas, settings.max_queued_requests, settings.max_body_bytes) == (2, 5, 4096)
    assert (settings.served_model_name, settings.cors_origins) == (["a", "b"], ["https://x.example"])
    assert settings.api_key_file == "keys"
    captured = capsys.readouterr()
    assert "http://0.0.0.0:9000" in captured.err
    assert not captured.out


def test_the_configuration_is_read_again(tmp_path: Path) -> None:
    path, server = tmp_path / "raypp.toml", FakeServer()
    path.write_text('[model]\nmodel = "tiny"\n[parallel]\nnum_stages = 2\n')
    assert main(["serve", "--config", str(path), "--max-num-seqs", "8"], entry_points=EntryPoints(serve=server)) == 0
    assert server.read_again() == server.config
    path.write_text(path.read_text().replace("2", "3"))
    config = server.read_again()
    assert (config.parallel.num_stages, config.scheduler.max_num_seqs) == (3, 8)
    path.write_text("[parallel")
    with pytest.raises(ConfigError, match="not valid TOML"):
        server.read_again()


def test_defaults() -> None:
    server = FakeServer()
    assert main(["serve", "tiny"], entry_points=EntryPoints(serve=server)) == 0
    assert server.address == HttpAddress(host="127.0.0.1", port=8000, app_name="raypp", route_prefix="/")
    assert server.settings == HttpSettings()


@pytest.mark.parametrize(
    ("options", "num_stages", "num_members"),
    [
        ([], 1, 2),
        (["--num-stages", "1"], 1, 1),
        (["--tensor-parallel-size", "1"], 1, 1),
        (["--num-replicas", "2"], 1, 1),  # which share the GPUs
        (["--device", "cpu"], 1, 1),
    ],
)
def test_on_several_gpus_what_info_advises_is_taken(
    options: list[str],
    num_stages: int,
    num_members: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    machine = Machine((Gpu(140 << 30, "NVIDIA H200"),) * 2)
    hardware = Hardware(32, 1 << 38, 2, "NVIDIA H200", 140 << 30, (9, 0), machines=(machine,))
    monkeypatch.setattr(Hardware, "of_this_machine", lambda: hardware)
    monkeypatch.setattr(fit, "busy_gpus", list)
    server, model = FakeServer(), str(ROOT / "benchmarks" / "models" / "qwen3-8b")
    assert main(["serve", model, *options], entry_points=EntryPoints(serve=server)) == 0
    assert server.config is not None
    parallel = server.config.parallel
    assert (parallel.num_stages, parallel.tensor_parallel_size) == (num_stages, num_members)
    said = "num_stages=1, tensor_parallel_size=2, as `raypp info` advises" in capsys.readouterr().err
    assert said == (not options)
    monkeypatch.setattr(fit, "busy_gpus", lambda: [0, 1])  # by this engine
    assert server.read_again() == server.config


@pytest.mark.parametrize(
    "option",
    [["--num-replicas", "0"], ["--max-body-bytes", "1"], ["--tool-call-parser", "x"], ["--reasoning-parser", "x"]],
)
def test_what_cannot_be_is_told_before_anything_starts(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "tiny", *option]) == 2
    assert option[0].removeprefix("--").replace("-", "_") in capsys.readouterr().err


def test_a_model_that_does_not_exist_is_told_before_ray_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "/no/such/model"]) == 2
    assert "/no/such/model" in capsys.readouterr().err


def test_a_port_that_is_taken_is_told_before_ray_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "tiny", "--port", str(taken.getsockname()[1])]) == 2
    assert "the port cannot be used" in capsys.readouterr().err
    assert not ray.is_initialized()


def test_the_example_configuration_is_one() -> None:
    deployed = ServeDeploySchema.model_validate(yaml.safe_load((ROOT / "configs/serve.yaml").read_text()))
    [application] = deployed.applications
    assert application.import_path == "serve_app.app:build"
    config, settings = split_arguments(application.args)
    assert config.parallel.num_stages == 2
    assert settings.num_replicas == 1


def test_the_readmes_command_is_one() -> None:
    [line] = re.findall(r"^(raypp serve .*) &$", (ROOT / "README.md").read_text(), re.MULTILINE)
    server = FakeServer()
    assert main(shlex.split(line)[1:], entry_points=EntryPoints(serve=server)) == 0


def test_unknown_arguments_of_serve_run_are_named() -> None:
    with pytest.raises(ConfigError, match="num_stages"):
        split_arguments({"model": "tiny", "num_stagess": "2"})

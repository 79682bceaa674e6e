"""Flat arguments, as `serve run` hands them over, become the engine's configuration and the door's settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypp.config.http_settings import HttpSettings
from raypp.errors import ConfigError
from serve_app.app import split_arguments


def test_text_is_read_as_what_it_spells() -> None:
    config, settings = split_arguments(
        {
            "model": "tiny",
            "num_stages": "2",
            "enable_prefix_caching": "false",
            "dtype": "float32",
            "num_replicas": "3",
            "served_model_name": "gpt",
            "api_keys": '["a", "b"]',
            "speculative": '{"method": "ngram"}',
            "cors_origins": "*",
            "health_check_period_s": "1.5",
        }
    )
    assert (config.model.model, config.parallel.num_stages, config.model.dtype) == ("tiny", 2, "float32")
    assert config.cache.enable_prefix_caching is False
    assert config.speculative.method == "ngram"
    assert settings == HttpSettings(
        num_replicas=3,
        served_model_name=["gpt"],
        api_keys=["a", "b"],
        cors_origins=["*"],
        health_check_period_s=1.5,
    )


def test_values_of_a_yaml_file_are_taken_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "engine.toml"
    file.write_text('[model]\nmodel = "tiny"\n[parallel]\nnum_stages = 4\n')
    config, settings = split_arguments({"config": str(file), "num_stages": 2, "max_queued_requests": 7})
    assert config.parallel.num_stages == 2
    assert settings.max_queued_requests == 7


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"model": "tiny", "num_stage": 2}, "num_stages"),
        ({"model": "tiny", "max_queued": 2}, "max_queued_requests (HTTP)"),
        ({"num_stages": 2}, "model=M"),
        ({"model": "tiny", "num_replicas": "many"}, "num_replicas"),
        ({"model": "tiny", "max_body_bytes": -1}, "max_body_bytes"),
    ],
)
def test_mistakes_are_named(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        split_arguments(arguments)
    assert said in str(caught.value)


def test_keys_of_a_file_are_added(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\n  two \n")
    assert HttpSettings(api_keys=["zero"], api_key_file=str(file)).keys() == ["zero", "one", "two"]


def test_a_file_without_keys_does_not_open_the_door(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("\n")
    for path in (file, tmp_path / "missing"):
        with pytest.raises(ConfigError):
            HttpSettings(api_key_file=str(path)).keys()

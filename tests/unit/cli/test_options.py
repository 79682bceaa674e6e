"""Options are taken as they are spelled."""

from __future__ import annotations

import argparse
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import pytest

from raypp.cli.engine_options import add_engine_options, engine_config
from raypp.cli.main import EntryPoints, main
from raypp.config.engine_config import EngineConfig
from raypp.config.http_settings import HttpAddress, HttpSettings
from raypp.config.options import ADDRESS_SETTINGS, ENGINE_SETTINGS, HTTP_SETTINGS, VARIABLES, value_of
from raypp.config.sections import ModelSection
from raypp.errors import ConfigError


@pytest.mark.parametrize("argv", [["info", "--mod", "tiny"], ["info", "tiny", "--num-st", "2"], ["--vers"]])
def test_an_abbreviated_option_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert argv[-1 if len(argv) == 1 else -2] in capsys.readouterr().err


def test_a_chat_template_is_read_where_the_command_runs(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_engine_options(parser)

    def model(*argv: str) -> ModelSection:
        return engine_config(parser.parse_args(["tiny", *argv])).model

    (tmp_path / "mine.jinja").write_text("{{ messages }}")
    for given in (str(tmp_path / "mine.jinja"), "{{ messages }}"):
        assert model("--chat-template", given).chat_template == "{{ messages }}"
    assert model("--revision", "v1").revision == "v1"
    with pytest.raises(ConfigError, match="cannot be read"):
        model("--chat-template", str(tmp_path / "other.jinja"))
    for text, said in (("", "nothing"), (" \n", "nothing"), ("Hello", "'Hello'")):
        (tmp_path / "mine.jinja").write_text(text)
        with pytest.raises(ConfigError, match=f"the file of the chat template holds none; got: .*mine.jinja': {said}"):
            model("--chat-template", str(tmp_path / "mine.jinja"))


def test_every_setting_has_an_option_and_a_variable_of_its_own() -> None:
    settings = [*chain(*ENGINE_SETTINGS.values()), *HTTP_SETTINGS, *ADDRESS_SETTINGS]
    assert len({setting.option for setting in settings}) == len(settings) == len(VARIABLES)
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    options = parser._option_string_actions
    for setting in chain(*ENGINE_SETTINGS.values()):
        if setting.key != "model.model":
            assert str(setting.field.description) in str(options[setting.option].help).replace("%%", "%")
    parser.format_help()  # a % in a setting's documentation would end it


@pytest.mark.parametrize(
    ("text", "annotation", "value"),
    [
        ("2", int, 2),
        ("2", float, 2.0),
        ("x", int, "x"),
        ("none", int | None, None),
        ("none", str, "none"),
        ("TRUE", bool, True),
        ("off", bool, False),
        ("maybe", bool, "maybe"),
        ("1, 2", list[int], [1, 2]),
        ("[1, 2]", list[int] | None, [1, 2]),
        ("[1", list[int], "[1"),
        ("a,b", list[str], ["a", "b"]),
        ('{"a": 1}', dict[str, float], {"a": 1}),
        ("12", str | None, "12"),
        ("12", Literal["a"] | None, "12"),
    ],
)
def test_a_text_is_read_as_its_settings_type(text: str, annotation: Any, value: object) -> None:
    assert value_of(text, annotation) == value


def test_settings_of_the_server_come_from_options_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    def serve(
        config: EngineConfig, settings: HttpSettings, *, address: HttpAddress, on_ready: object, **_: object
    ) -> None:
        taken.append((config, settings, address))

    for name, value in {"MODEL": "tiny", "API_KEYS": "a,b", "PORT": "9001", "HOST": "0.0.0.0", "COMPILE": "1"}.items():
        monkeypatch.setenv(f"RAYPP_{name}", value)
    options = ["--port", "9002", "--served-model-name", "x", "--served-model-name", "y,z", "--no-prefix-routing"]
    assert main(["serve", *options, "--no-compile", "--graphs", "none"], entry_points=EntryPoints(serve=serve)) == 0
    [(config, settings, address)] = taken
    assert (config.model.model, config.graphs.compile, config.graphs.mode) == ("tiny", False, "none")
    assert settings == HttpSettings(api_keys=["a", "b"], served_model_name=["x", "y", "z"], prefix_routing=False)
    assert address == HttpAddress(host="0.0.0.0", port=9002)


@pytest.mark.parametrize(
    ("options", "variables", "said"),
    [
        (["--num-stages", "x"], {"RAYPP_NUM_STAGES": "y"}, "got: 'x', from --num-stages"),
        ([], {"RAYPP_NUM_STAGES": "y"}, "got: 'y', from RAYPP_NUM_STAGES"),
        ([], {}, "got: 'z', from [parallel] of "),
    ],
)
def test_a_wrong_value_is_told_with_its_source(
    options: list[str],
    variables: dict[str, str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "raypp.toml"
    path.write_text('[model]\nmodel = "tiny"\n[parallel]\nnum_stages = "z"\n')
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["info", "--config", str(path), *options]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (
            ["serve", "--max-modle-len", "x"],
            "unknown option --max-modle-len; did you mean --max-model-len?",
        ),
        (["serve", "--model", "x"], "the model stands behind the command, as in raypp serve MODEL"),
        (["batch", "--inptu=x", "--output", "y"], "unknown option --inptu; did you mean --input?"),
        (["generate", "-port", "x"], "unknown option -port"),
        (["info", "--wxyz"], "unknown option --wxyz; raypp info --help lists those that there are"),
        (["serve", "-tp", "2"], "unknown option -tp; use --tensor-parallel-size (each stage has"),
        (["info", "--pipeline-parallel-size=2"], "unknown option --pipeline-parallel-size; use --num-stages\n"),
        (["batch", "--enforce-eager"], "use --graphs (with none, there are no CUDA graphs)"),
        (["info", "--tokenizer-mode", "slow"], "leave it out: the tokenizer is the model's own"),
        (["info", "--port", "1"], "it is an option of raypp serve, not of raypp info"),
        (["doctor", "--tensor-parallel-size", "2"], "raypp doctor --help lists those that there are"),
        (["serve", "--enable-lora"], "unknown option --enable-lora; merge adapters into the weights: raypp has none"),
        (["serve", "-c", "4096"], "unknown option -c; use --max-model-len\n"),
        (["serve", "--ctx-size", "4096"], "use --max-model-len\n"),
        (["serve", "--enable-auto-tool-choice"], "use --tool-call-parser (with auto, the default, tools work"),
        (["info", "--api-key", "x"], "with raypp serve, use --api-key-file (it names a file"),
        (["serve", "--enable-dreams"], "unknown option --enable-dreams; raypp serve --help lists"),
        (["serve", "--block-sise", "16"], "did you mean --block-size?"),
        (["serve", "--tp", "2"], "unknown option --tp; use --tensor-parallel-size (each stage"),
        (["serve", "--pp", "2"], "unknown option --pp; use --num-stages\n"),
        (["serve", "--dp=2"], "unknown option --dp; use --num-replicas (several engines share the requests)"),
        (["info", "--dp=2"], "unknown option --dp; with raypp serve, use --num-replicas"),
        (["serve", "--seed", "1"], "unknown option --seed; use --engine-seed (it holds for requests that bring none"),
        (["serve", "--temp", "1"], "each request has its own: the field temperature of its body"),
        (["serve", "--top-p", "1"], "each request has its own: the field top_p of its body"),
        (["generate", "--temp", "1"], "unknown option --temp; did you mean --temperature?"),
        (["--tensor-parallel-size", "2", "serve", "tiny"], "options stand behind the command, as in raypp serve MODEL"),
        (["--port", "2", "serve", "tiny"], "unknown option --port; options stand behind the command"),
        (["--vers"], "unknown option --vers; did you mean --version?"),
    ],
)
def test_an_unknown_option_is_answered_with_the_nearest(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err

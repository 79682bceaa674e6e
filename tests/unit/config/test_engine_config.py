"""One configuration, from names, files and both; refusals that help."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from raypp.config.engine_config import EngineConfig, to_toml
from raypp.config.env import passed_on, read_environment, warn_of_unknown_variables
from raypp.config.names import SECTION_OF_SETTING, SECTIONS
from raypp.errors import ConfigError

REPOSITORY = Path(__file__).parents[3]


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "engine.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_flat_settings_reach_their_sections() -> None:
    config = EngineConfig.from_flat("tiny", num_stages=2, layer_partition=(3, 1), block_size=32, trace="t.json", seed=5)
    assert config.model.model == "tiny"
    assert config.model.seed == 5
    assert config.parallel.layer_partition == [3, 1]
    assert config.cache.block_size == 32
    assert config.observability.trace == "t.json"


def test_every_setting_has_one_section_and_a_docstring() -> None:
    names = [name for cls in SECTIONS.values() for name in cls.model_fields]
    assert sorted(names) == sorted([*SECTION_OF_SETTING, "model"])  # given flat, the engine's
    assert SECTION_OF_SETTING["model"] == "model"
    for cls in SECTIONS.values():
        for name, info in cls.model_fields.items():
            assert info.description, name
    assert list(EngineConfig.model_fields) == list(SECTIONS)


def test_frozen(tmp_path: Path) -> None:
    config = EngineConfig.from_flat(tmp_path)
    assert config.model.model == str(tmp_path)
    with pytest.raises(ValueError, match="frozen"):
        config.parallel.num_stages = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_stage": 2}, ["num_stage;", "num_stages (section parallel)", "did you mean num_stages?"]),
        ({"gpu_mem_utilization": 0.5}, ["gpu_memory_utilization (section cache)"]),
        ({"zzzz": 1}, ["zzzz", "one of allow_image_urls, "]),
        ({"pipeline_parallel_size": 2}, ["pipeline_parallel_size", "hint: use num_stages of section parallel"]),
        ({"tp_size": 2}, ["use tensor_parallel_size of section parallel"]),
        ({"enforce_eager": True}, ["use mode of section graphs (with none, "]),
        ({"num_replicas": 2}, ["num_replicas", "raypp serve"]),
        ({"layer_partition": [3, 3]}, ["[3, 3] for 1 stages", "hint: num_stages = 2"]),
        ({"layer_partition": []}, ["[] for 1 stages", "at least 1, per stage"]),
        ({"num_stages": "2"}, ["parallel.num_stages", "got: '2'", "expected: integer", "Pipeline stages"]),
        ({"num_stages": True}, ["parallel.num_stages"]),
        ({"num_stages": 2.0}, ["parallel.num_stages"]),
        ({"num_stages": None}, ["parallel.num_stages"]),
        ({"num_stages": {1}}, ["{1} (set)"]),
        ({"num_stages": 0, "block_size": 0}, ["cache.block_size", "and for parallel.num_stages"]),
        ({"gpu_memory_utilization": float("nan")}, ["gpu_memory_utilization"]),
        ({"dtype": "fp16"}, ["model.dtype", "'float32', 'bfloat16' or 'float16'"]),
        ({"layer_partition": [1, "2"], "num_stages": 2}, ["parallel.layer_partition.1"]),
        ({"layer_partition": [1], "num_stages": 2}, ["layer_partition", "[1] for 2 stages"]),
        ({"layer_partition": [4, 0], "num_stages": 2}, ["layer_partition", "at least 1"]),
        ({"layer_partition": []}, ["layer_partition"]),
        ({"transport": "local", "num_stages": 2}, ["transport", "num_stages = 1"]),
        (
            {"max_num_seqs": 100, "max_num_batched_tokens": 49, "num_stages": 2},
            ["max_num_batched_tokens", "at least 50"],
        ),
    ],
)
def test_refusals_say_what_would_be_right(settings: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_flat("tiny", **settings)
    for word in words:
        assert word in str(caught.value)
    assert caught.value.expected is not None


def test_speculation_is_given_as_a_section_flat_or_in_a_file(tmp_path: Path) -> None:
    given = {"method": "ngram", "num_speculative_tokens": 4, "min_n": 2, "max_n": 5}
    config = EngineConfig.from_flat("tiny", speculative=given)
    assert config == EngineConfig.from_flat("tiny", **given)
    path = write(
        tmp_path,
        '[model]\nmodel = "tiny"\n[speculative]\nmethod = "ngram"\nnum_speculative_tokens = 4\nmin_n = 2\nmax_n = 5\n',
    )
    assert config == EngineConfig.from_toml(path)
    assert EngineConfig.from_toml(path, speculative={"max_n": 3}).speculative.max_n == 3
    assert config.speculative.ladder == (0, 4)
    assert EngineConfig.from_flat("tiny", method="ngram").speculative.ladder == (0, 2, 4, 8)
    assert EngineConfig.from_flat("tiny", method="ngram", draft_ladder=[3]).speculative.ladder == (0, 3)
    off = EngineConfig.from_flat("tiny", speculative=None).speculative
    assert (off.ladder, off.max_drafts) == ((0,), 0)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"methd": "ngram"}, ["methd", "did you mean method"]),
        ({"method": "eagle9"}, ["method", "ngram"]),
        ({"num_speculative_tokens": 4}, ["without a method", "num_speculative_tokens;", 'method = "ngram"']),
        ({"model": "tiny-eagle3"}, ["without a method", "got: model;", '"auto"']),
        ({"method": "ngram", "min_n": 4, "max_n": 3}, ["min_n", "4 and 3"]),
        ({"method": "ngram", "head_weights": "fp8"}, ["head_weights has no effect", "eagle3"]),
        ({"method": "ngram", "num_speculative_tokens": 0}, ["num_speculative_tokens", "greater than or equal to 1"]),
        ({"method": "ngram", "num_speculative_tokens": 17}, ["num_speculative_tokens", "less than or equal to 16"]),
        ({"method": "ngram", "draft_ladder": [4, 2]}, ["draft_ladder", "ascending"]),
        ({"method": "ngram", "draft_ladder": [0]}, ["draft_ladder", "above 0"]),
        ({"method": "ngram", "ngram_window": 5}, ["ngram_window", "greater than or equal to 64"]),
        ("ngram", ["speculative is a section", "a dict of its settings"]),
    ],
)
def test_refusals_of_speculation(given: object, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_flat("tiny", speculative=given)
    for word in words:
        assert word in str(caught.value)


def test_rows_of_a_step_are_rounded_up() -> None:
    EngineConfig.from_flat("tiny", max_num_seqs=101, max_num_batched_tokens=51, num_stages=2)
    with pytest.raises(ConfigError):
        EngineConfig.from_flat("tiny", max_num_seqs=101, max_num_batched_tokens=50, num_stages=2)


def test_toml_and_what_wins_over_it(tmp_path: Path) -> None:
    path = write(tmp_path, '[model]\nmodel = "tiny"\n[parallel]\nnum_stages = 2\nlayer_partition = [1, 3]\n')
    assert EngineConfig.from_toml(path).parallel.layer_partition == [1, 3]
    config = EngineConfig.from_toml(path, model="other", layer_partition=[2, 2], block_size=8)
    assert (config.model.model, config.parallel.num_stages) == ("other", 2)
    assert (config.parallel.layer_partition, config.cache.block_size) == ([2, 2], 8)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[modell]\n", ["modell", "did you mean model?"]),
        ("num_stagez = 2\n", ["num_stagez", "num_stages under [parallel]", "did you mean num_stages?"]),
        ("num_stages = 2\n", ["num_stages under [parallel]"]),
        ("[cache]\nblock_sise = 2\n", ["block_sise", "block_size (section cache)"]),
        ("[cache]\nnum_stages = 2\n", ["num_stages (section parallel)", "elsewhere"]),
        ("cache = 5\n", ["a table [cache]"]),
        ('model = "tiny"\n', ["model under [model]"]),
        ("[parallel]\nnum_stages = 2\n", ["no model"]),
        ("[parallel\n", ["not valid TOML", "engine.toml"]),
        ('[model]\nmodel = "tiny"\nseed = 1979-05-27\n', ["1979"]),
    ],
)
def test_refusals_of_files(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_toml(write(tmp_path, text))
    for word in words:
        assert word in str(caught.value)


def test_a_file_that_is_missing_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.toml"):
        EngineConfig.from_toml(tmp_path / "nothing.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not valid TOML"):
        EngineConfig.from_toml(tmp_path / "binary.toml")


def test_written_toml_reads_back(tmp_path: Path) -> None:
    model = 'odd "name"\\\t\n\x7f\x01 Grüße 🎉'
    config = EngineConfig.from_flat(model, num_stages=2, layer_partition=[1, 2], start_timeout_s=float("inf"))
    assert EngineConfig.from_toml(write(tmp_path, config.to_toml())) == config
    assert EngineConfig.model_validate_json(EngineConfig.from_flat("tiny").to_json()) == EngineConfig.from_flat("tiny")


def test_toml_of_every_kind_of_value() -> None:
    tables = {"a": {"text": "x", "yes": True, "one": 1, "half": 0.5, "big": 1e300, "list": [1, 2]}, "empty": {}}
    assert tomllib.loads(to_toml(tables)) == {"a": tables["a"]}


def test_with_settings_changes_these_alone() -> None:
    config = EngineConfig.from_flat("tiny", num_stages=2)
    changed = config.with_settings(block_size=8)
    assert (changed.cache.block_size, changed.parallel.num_stages, config.cache.block_size) == (8, 2, 16)
    with pytest.raises(ConfigError, match="block_size"):
        config.with_settings(block_sise=8)


def test_environment() -> None:
    assert read_environment({"HOME": "/", "RAYPP_LOG_LEVEL": "debug"}).log_level == "DEBUG"
    assert read_environment({}).log_level == "WARNING"
    with pytest.raises(ConfigError, match="RAYPP_LOG_LEVEL"):
        read_environment({"RAYPP_LOG_LEVEL": "loud"})
    beside_a_service = {"RAYPP_PORT": "tcp://raypp:8000", "RAYPP_NUM_STAGES": "2"}
    assert read_environment(beside_a_service).settings == {"RAYPP_NUM_STAGES": "2"}


def test_what_an_engines_processes_take_from_whoever_starts_it() -> None:
    taken = {"NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "eth0", "RAYPP_LOG_LEVEL": "debug"}
    assert passed_on({"HOME": "/", "HF_TOKEN": "secret", "CUDA_VISIBLE_DEVICES": "1", **taken}) == taken


def test_variables_that_raypp_does_not_have_are_ignored_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    beside_a_service = {"RAYPP_SERVICE_HOST": "raypp", "RAYPP_PORT_8000_TCP": "tcp://raypp:8000"}
    variables = {
        "HOME": "/",
        "RAYPP_LOG_LEVEL": "info",
        "RAYPP_LOGLEVEL": "INFO",
        **beside_a_service,
    }
    assert read_environment(variables).log_level == "INFO"
    warn_of_unknown_variables(variables)
    warn_of_unknown_variables(variables)
    warn_of_unknown_variables({"RAYPP_LOG_LEVEL": "info"})
    [record] = caplog.records
    assert "RAYPP_LOGLEVEL, RAYPP_PORT_8000_TCP, RAYPP_SERVICE_HOST" in record.getMessage()
    assert record.getMessage().endswith("; RAYPP_LOGLEVEL: did you mean RAYPP_LOG_LEVEL?")


def test_nobody_else_reads_raypps_environment_variables() -> None:
    for path in (REPOSITORY / "raypp").rglob("*.py"):
        if path.name not in ("env.py", "options.py"):  # the latter says what they are called
            strings = [n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)]
            assert not [s for s in strings if isinstance(s, str) and s.startswith("RAYPP_")], path


def test_the_page_of_settings_is_current() -> None:
    command = [sys.executable, str(REPOSITORY / "tools" / "make_config_docs.py"), "--check"]
    done = subprocess.run(command, cwd=REPOSITORY, env={"PYTHONPATH": str(REPOSITORY)}, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_the_documentation_names_types_and_values_as_users_write_them() -> None:
    page = (REPOSITORY / "docs" / "configuration.md").read_text()
    assert not re.search(r"Optional\[|typing\.", page)
    for value in ("half", "float", "fp8_e4m3", "float8_e4m3fn"):
        assert f"`{value}`" in page

"""`raypp tune`: what it prints, what it writes, what it refuses; the measuring itself is elsewhere."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raypp.cli.main import EntryPoints, main
from raypp.config.engine_config import EngineConfig
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.plan.measure import MeasuredCosts, Tuning, tune_partition

MACHINE = Hardware(num_cpu_cores=2, memory_bytes=64 << 30)


class Measuring:
    """Stands in for the device, and remembers what it was asked."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}

    def __call__(self, config: EngineConfig, **options: Any) -> Tuning:
        self.options = options
        measured = MeasuredCosts(
            num_rows=4,
            context_len=32,
            num_steps=8,
            layers_ms=(1.0,) * 6,
            embedding_ms=0.1,
            lm_head_ms=2.0,
            sampler_ms=0.5,
            every_stage_ms=0.2,
            first_stage_ms=0.1,
            last_stage_ms=2.5,
        )
        return tune_partition(plan_engine(config, MACHINE), measured)


def _tune(measuring: Measuring, *argv: str) -> int:
    return main(["tune", "tiny", "--num-stages", "2", *argv], entry_points=EntryPoints(tune=measuring))


def test_the_plan_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, measuring = tmp_path / "tuned.toml", Measuring()
    assert _tune(measuring, "--batch-size", "4", "--output", str(path)) == 0
    assert measuring.options == {"num_rows": 4, "context_len": None, "temperature": 1.0}
    printed = capsys.readouterr().out
    assert "expected gain: none; the default split is the fastest one" in printed
    assert str(path) in printed
    assert EngineConfig.from_toml(path).parallel.layer_partition == [4, 2]


def test_the_gain_is_the_one_over_what_an_engine_takes_without_tuning(capsys: pytest.CaptureFixture[str]) -> None:
    def measure(config: EngineConfig, **_: Any) -> Tuning:
        tuning = Measuring()(config)
        return replace(tuning, default=tuning.even)

    assert main(["tune", "tiny", "--num-stages", "2", "--output", "-"], entry_points=EntryPoints(tune=measure)) == 0
    assert "expected gain over the default split: +21.3% steps per second" in capsys.readouterr().err


def test_what_is_written_is_what_was_tuned_and_what_was_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYPP_BLOCK_SIZE", "8")
    path = tmp_path / "tuned.toml"
    assert _tune(Measuring(), "--max-model-len", "64", "--output", str(path)) == 0
    assert tomllib.loads(path.read_text()) == {
        "model": {"model": "tiny", "max_model_len": 64},
        "cache": {"block_size": 8},
        "parallel": {"num_stages": 2, "layer_partition": [4, 2]},
    }


def test_json_and_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert _tune(Measuring(), "--json", "--output", "-") == 0
    out, err = capsys.readouterr()
    assert json.loads(err)["gain_over_even"] == pytest.approx(0.2128, abs=1e-4)
    assert out.startswith("# Layers per stage")
    assert "layer_partition = [4, 2]" in out


def test_traffic_is_read_off_a_log(tmp_path: Path) -> None:
    log, path, measuring = tmp_path / "log.jsonl", tmp_path / "tuned.toml", Measuring()
    log.write_text('{"prompt_tokens": 800, "completion_tokens": 160}')
    assert _tune(measuring, "--traffic", str(log), "--output", str(path)) == 0
    assert measuring.options["context_len"] == 880
    assert EngineConfig.from_toml(path).parallel.prompt_tokens_per_output == 5.0


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--batch-size", "0"], "--batch-size is not a size"),
        (["--context-len", "-3"], "--context-len is not a size"),
        (["--traffic", "no/such/log"], "log of traffic cannot be read"),
        (["--output", "no/such/folder/x.toml"], "cannot be written where it is wanted"),
        (["--num-stages", "7", "--output", "-"], "more stages than layers"),
    ],
)
def test_what_cannot_be_is_refused(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _tune(Measuring(), *argv) == 2
    assert words in capsys.readouterr().err

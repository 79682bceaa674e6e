"""The configurations in configs/ fit the machines that they are for, as their comments say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from raypp.config.engine_config import EngineConfig
from raypp.plan.fit import check_fit
from raypp.plan.hardware import described_hardware, read_machines

_ROOT = Path(__file__).parents[3]
_SHAPES = _ROOT / "benchmarks" / "models"
_CLAIM = re.compile(r"^#   Qwen/([\w.-]+): ([\d,]+) requests? of ([\d,]+) tokens at once$", re.MULTILINE)
_CONFIGS = sorted((_ROOT / "configs").glob("*.toml"))


@pytest.mark.parametrize("path", _CONFIGS, ids=lambda path: path.stem)
def test_what_the_comment_says_fits(path: Path) -> None:
    text = path.read_text()
    [gpus] = re.findall(r"--gpus ([^`\s]+)`", text)
    machines = read_machines(gpus)
    claims = _CLAIM.findall(text)
    assert EngineConfig.from_toml(path).model.model == f"Qwen/{claims[0][0]}", "the first model is the file's"
    for model, num_requests, num_tokens in claims:
        config = EngineConfig.from_toml(path, model=_SHAPES / model.lower())
        fit = check_fit(config, described_hardware(machines))
        assert fit.plan is not None, fit.problem
        assert int(num_tokens.replace(",", "")) <= fit.plan.max_model_len
        assert f"{fit.num_requests(int(num_tokens.replace(',', ''))):,}" == num_requests, f"{model}, {num_tokens}"
        assert fit.num_machines == len(machines)


@pytest.mark.parametrize("path", _CONFIGS, ids=lambda path: path.stem)
def test_its_own_name_is_in_its_commands(path: Path) -> None:
    named = set(re.findall(r"configs/[\w.-]+\.toml", path.read_text()))
    assert named == {f"configs/{path.name}"}


def test_there_is_one_for_each_kind_of_machine() -> None:
    assert [path.stem for path in _CONFIGS] == ["2x24gb", "2x80gb", "4x24gb-two-machines"]

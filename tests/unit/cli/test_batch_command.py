"""`raypp batch`: what its options mean, and what it refuses inside a Ray job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import raypp.cli.batch as command
from raypp.batch_job.job import BatchJob
from raypp.batch_job.job_settings import JobSettings
from raypp.cli.main import main
from raypp.config.env import read_environment

IN_A_JOB = json.dumps({"runtime_env": {}, "metadata": {"job_submission_id": "raysubmit_1"}})


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[JobSettings]:
    """The settings of the jobs that would have been run."""
    taken: list[JobSettings] = []

    def take(job: BatchJob) -> int:
        taken.append(job.settings)
        return 0

    monkeypatch.setattr(command, "run_until_stopped", take)
    return taken


def test_options(settings: list[JobSettings]) -> None:
    options = "some/model --input in.jsonl --output dir/out.jsonl --num-stages 3 --max-tokens 9 --temperature 0"
    more = "--stop x --stop y --logit-bias 5=1 --errors e.jsonl --max-in-flight 7 --overwrite --progress-interval 2.5"
    assert main(["batch", *options.split(), *more.split()]) == 0
    (job,) = settings
    assert (job.input_path, job.output_path) == (Path("in.jsonl"), Path("dir/out.jsonl"))
    assert (job.errors_path, job.manifest_path) == (Path("e.jsonl"), Path("dir/out.jsonl.job.json"))
    assert job.config.parallel.num_stages == 3
    assert job.defaults == {"max_tokens": 9, "temperature": 0, "stop": ["x", "y"], "logit_bias": {"5": 1.0}}
    assert job.served_model_names == ("some/model", "model")
    assert (job.window, job.overwrite, job.progress_interval_s) == (7, True, 2.5)


def test_defaults(settings: list[JobSettings]) -> None:
    options = ["--input", "a", "--output", "b", "--max-num-seqs", "5", "--served-model-name", "gpt"]
    assert main(["batch", "tiny", *options]) == 0
    (job,) = settings
    assert job.errors_path == Path("b.errors.jsonl")
    assert (job.window, job.overwrite, dict(job.defaults), job.served_model_names) == (10, False, {}, ("gpt",))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--input", "a", "--output", "a"], "the same file"),
        (["--input", "a", "--output", "b", "--errors", "b"], "output and error file are the same file"),
        (["--input", "a", "--output", "b", "--max-tokens", "0"], "max_tokens"),
        (["--input", "a", "--output", "b", "--temperature", "nan"], "temperature"),
        (["--input", "a", "--output", "b", "--max-in-flight", "0"], "max_in_flight"),
        (["--input", "a", "--output", "b", "--progress-interval", "0"], "progress_interval_s"),
    ],
)
def test_mistakes_are_found_before_anything_is_read(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["batch", "tiny", *options]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("paths", "name"),
    [(("in", "/out", "/e"), "input"), (("/in", "./out", "/e"), "output"), (("/in", "/out", "e"), "error file")],
)
def test_relative_paths_inside_a_ray_job_are_refused(
    paths: tuple[str, str, str], name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", IN_A_JOB)
    files = ["--input", paths[0], "--output", paths[1], "--errors", paths[2]]
    assert main(["batch", "tiny", *files]) == 2
    err = capsys.readouterr().err
    assert f"a relative {name} inside a Ray job" in err
    assert "Ray throws away" in err


def test_absolute_paths_inside_a_ray_job(settings: list[JobSettings], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", IN_A_JOB)
    assert main(["batch", "tiny", "--input", "/in", "--output", "/out"]) == 0
    assert settings[0].output_path == Path("/out")


@pytest.mark.parametrize(
    ("variables", "job_id"),
    [
        ({}, None),
        ({"RAY_JOB_CONFIG_JSON_ENV_VAR": IN_A_JOB}, "raysubmit_1"),
        ({"RAY_JOB_CONFIG_JSON_ENV_VAR": '{"metadata": {}}'}, None),
        ({"RAY_JOB_CONFIG_JSON_ENV_VAR": "{"}, None),
    ],
)
def test_the_environment_of_a_ray_job(variables: dict[str, str], job_id: str | None) -> None:
    assert read_environment(variables).ray_job_id == job_id


def test_an_input_that_cannot_be_run_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").write_text("\n")
    assert main(["batch", "tiny", "--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("raypp: the input has no lines\n  got: ")
    assert not (tmp_path / "out").exists()

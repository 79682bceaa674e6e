"""What a job is asked to do, checked before anything is started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from raypp.config.engine_config import EngineConfig
from raypp.errors import ConfigError
from raypp.openai_api.completion_request import CompletionRequest
from raypp.openai_api.error_bodies import parse_body
from raypp.openai_api.syntaxes import check_parsers

_MODEL_LEN_FOR_CHECK = 1 << 30


@dataclass(frozen=True, kw_only=True)
class JobSettings:
    """One batch job.

    Attributes:
        input_path: JSON lines.
        output_path: Where the answers go; an output of the same job is gone on with.
        error_path: Where the errors of lines go that failed; None: beside the output.
        config: The engine.
        defaults: Sampling parameters, by the names of `/v1/completions`, that hold where a line says nothing. Other
            routes take them by their own names.
        served_model_names: What a line may call the model; the first is what answers call it.
        overwrite: Throw an existing output away.
        max_in_flight: Requests at the engine at once; None: twice what it runs at once.
        max_in_flight_bytes: Of input lines at the engine at once.
        max_engine_starts: Engines that may die in a row without a single line answered before the job gives up.
        progress_interval_s: Between two reports where there is no terminal.
    """

    input_path: Path
    output_path: Path
    config: EngineConfig
    error_path: Path | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    served_model_names: tuple[str, ...] = ()
    overwrite: bool = False
    max_in_flight: int | None = None
    max_in_flight_bytes: int = 64 << 20
    max_engine_starts: int = 3
    progress_interval_s: float = 10.0

    def __post_init__(self) -> None:
        if not self.served_model_names:
            model = self.config.model.model
            object.__setattr__(self, "served_model_names", tuple(dict.fromkeys((model, Path(model).name))))
        for name, least in (("max_in_flight", 1), ("max_engine_starts", 1), ("progress_interval_s", 0.1)):
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise ConfigError(f"{name} is too small", got=value, expected=f"at least {least}")
        self._check_files()
        # What no line could be run with is said now, not on every line.
        check_parsers(self.config.model.tool_call_parser, self.config.model.reasoning_parser)
        parse_body(CompletionRequest, {"prompt": "", **self.defaults}).sampling_params(_MODEL_LEN_FOR_CHECK)

    @property
    def errors_path(self) -> Path:
        """Where the errors go."""
        return self.error_path or self.output_path.with_name(self.output_path.name + ".errors.jsonl")

    @property
    def manifest_path(self) -> Path:
        """Where the job is described, beside its output."""
        return self.output_path.with_name(self.output_path.name + ".job.json")

    @property
    def window(self) -> int:
        """Requests at the engine at once."""
        return self.max_in_flight or 2 * self.config.scheduler.max_num_seqs

    def what_answers_depend_on(self) -> dict[str, Any]:
        """Return every setting that can change a text, or the file it is in, as plain values.

        How many stages there are cannot.
        """
        model = self.config.model
        return {
            "model": model.model,
            "load_format": model.load_format,
            "dtype": model.dtype,
            "quantization": model.quantization,
            "batch_invariant": model.batch_invariant,
            "even_routing": model.even_routing,
            "kv_cache_dtype": self.config.cache.kv_cache_dtype,
            "max_model_len": model.max_model_len,
            "seed": model.seed,
            "served_model_names": list(self.served_model_names),
            "error file": os.path.relpath(self.errors_path.resolve(), self.output_path.resolve().parent),
            **{f"default {name}": value for name, value in self.defaults.items()},
        }

    def _check_files(self) -> None:
        files = {
            "input": self.input_path,
            "output": self.output_path,
            "error file": self.errors_path,
            "manifest": self.manifest_path,
        }
        for (name, path), (other_name, other) in combinations(files.items(), 2):
            if _is_same_file(path, other):
                raise ConfigError(f"{name} and {other_name} are the same file", got=other, expected="two files")


def _is_same_file(one: Path, other: Path) -> bool:
    try:
        return one.resolve() == other.resolve() or one.samefile(other)
    except (OSError, RuntimeError):  # not there, or not to be looked at: opening it says so
        return False


def check_job_path(path: str, name: str, ray_job_id: str | None) -> Path:
    """Return a path that this process was given.

    Raises:
        ConfigError: it is relative, and this is the entrypoint of a Ray job.
    """
    if ray_job_id is not None and not Path(path).is_absolute():
        raise ConfigError(
            f"a relative {name} inside a Ray job",
            got=path,
            expected="an absolute path on a disk that outlives the job",
            hint="a job's working directory is a copy that Ray throws away, and with it what was written there",
        )
    return Path(path)

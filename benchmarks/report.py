"""What every benchmark ends with: one JSON line with the figures and all that is needed to judge them."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raypp import LLM, AsyncLLM

_ROOT = Path(__file__).parents[1]
_PACKAGES = ("torch", "ray", "transformers", "numpy", "triton", "flashinfer-python")


def print_report(
    benchmark: str, settings: dict[str, Any], figures: dict[str, Any], config: dict[str, Any] | None = None
) -> None:
    """Print the last line of a benchmark: figures with commit, versions, hardware and settings."""
    print(json.dumps(make_report(benchmark, settings, figures, config)))


def make_report(
    benchmark: str, settings: dict[str, Any], figures: dict[str, Any], config: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return figures with commit, versions, hardware and settings.

    Args:
        benchmark: Its name.
        settings: What it was told.
        figures: What it found.
        config: The engine's, see `resolved_config`; None for what runs no engine, or several.
    """
    return {
        "benchmark": benchmark,
        "commit": _commit(),
        "versions": _versions(),
        "hardware": {"cpu": _cpu_name(), "num_cpu_cores": len(os.sched_getaffinity(0)), "gpus": _gpu_names()},
        "settings": _plain(settings),
        **({} if config is None else {"config": _plain(config)}),
        "figures": figures,
    }


class GrowingReport:
    """A report that is written to a file whenever there is more: what a run that is killed has found, is kept.

    Attributes:
        figures: By what `put` calls them.
    """

    def __init__(self, benchmark: str, settings: dict[str, Any], path: Path | None) -> None:
        """Begin one.

        Args:
            benchmark: Its name.
            settings: What it was told.
            path: The file; None to print it at the end.
        """
        self.figures: dict[str, Any] = {}
        self._report = make_report(benchmark, settings, self.figures)
        self._path = path

    def note_config(self, config: dict[str, Any]) -> None:
        """Keep the first engine's configuration; the figures of others name the settings in which they differ."""
        self._report.setdefault("config", _plain(config))

    def put(self, name: str, figures: Any) -> None:
        """Keep figures, in place of those from before under that name."""
        self.figures[name] = figures
        if self._path is not None:
            self._path.write_text(self._as_json())

    def print(self) -> None:
        """Print it as the last line, unless it is in its file."""
        if self._path is None:
            print(self._as_json())

    def _as_json(self) -> str:
        return json.dumps(self._report)


def resolved_config(llm: LLM | AsyncLLM) -> dict[str, Any]:
    """Return an engine's whole configuration, with what it decided itself in place of what was left open."""
    plan = llm.plan()
    config = llm.config.with_settings(
        dtype=plan["dtype"],
        device=plan["device"],
        max_model_len=plan["max_model_len"],
        max_steps_per_cohort=plan["max_steps_per_cohort"],
        num_kv_blocks=plan["num_kv_blocks"],
        layer_partition=[stage["num_layers"] for stage in plan["stages"]],
        transport=plan["transport"],
        stage_num_threads=plan["num_threads_per_stage"],
    )
    return config.model_dump(mode="json", exclude_none=True)


def _plain(value: Any) -> Any:
    """Return a setting as JSON has it, which knows no infinity, and without the folders of one machine."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, str | Path) and Path(value).is_absolute():
        path = Path(value)
        return path.relative_to(_ROOT).as_posix() if path.is_relative_to(_ROOT) else path.name
    if isinstance(value, Path) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    return value


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    given = os.environ.get("REPORT_COMMIT")  # of a copy whose history is not its own
    if given:
        return given
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):  # a copy without its history
        return "unknown"
    return described.stdout.strip()


def _gpu_names() -> list[str]:
    """Return the GPUs' names without making this process one of their users."""
    from raypp.plan.hardware import Hardware

    hardware = Hardware.of_this_machine()
    return [hardware.gpu_name] * hardware.num_gpus


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"

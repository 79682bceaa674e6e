"""What every benchmark ends with: one JSON line with the figures and all that is needed to judge them."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any


def print_report(benchmark: str, settings: dict[str, Any], figures: dict[str, Any]) -> None:
    """Print the last line of a benchmark: figures with commit, versions, hardware and settings."""
    report = {
        "benchmark": benchmark,
        "commit": _commit(),
        "versions": {name: version(name) for name in ("torch", "ray", "transformers", "numpy")},
        "hardware": {"cpu": _cpu_name(), "num_cpu_cores": len(os.sched_getaffinity(0)), "gpus": _gpu_names()},
        "settings": settings,
        "figures": figures,
    }
    print(json.dumps(report))


def _commit() -> str:
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return described.stdout.strip()


def _gpu_names() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"

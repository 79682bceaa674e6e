"""A failure is printed when it happens: time on a GPU may end before the tests do.

The reference computes on a CPU. Where fla is installed, transformers would take its kernels, which a CPU cannot run.
"""

from __future__ import annotations

import sys
from importlib import import_module

import pytest

sys.modules["fla"] = None  # type: ignore[assignment]
for name in ("qwen3_5", "qwen3_5_moe", "qwen3_next"):
    import_module(f"transformers.models.{name}.modeling_{name}")
del sys.modules["fla"]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print what went wrong at once; the summary at the end repeats it."""
    if report.failed:
        print(f"\n{report.nodeid} ({report.when})\n{report.longreprtext[-3000:]}", flush=True)

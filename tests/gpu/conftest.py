"""A failure is printed when it happens: time on a GPU may end before the tests do."""

from __future__ import annotations

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print what went wrong at once; the summary at the end repeats it."""
    if report.failed:
        print(f"\n{report.nodeid} ({report.when})\n{report.longreprtext[-3000:]}", flush=True)

"""Limits of tests, as a plugin of pytest: one test that hangs or takes too long fails, and all others are run.

`faulthandler_timeout`, in seconds, is the limit of a test. One of its phases (fixtures, the test itself, the end of
fixtures) fails once its process has used 45 % of that as processor time, which does not depend on what else the machine
does, or once it has taken 90 % of it: then it waits for something. What goes on even so, in compiled code or for as
long again after it has failed, ends with its process; a worker of pytest-xdist is then replaced, and does the rest of
the work.

`one_process`, a list, names folders whose tests one worker runs, one after the other: each entry those of one worker.
Workers with other tests give way to it: such tests start processes and wait for them until a deadline.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

_PROCESSOR_SHARE, _TIME_SHARE = 0.45, 0.9
_NICENESS = 10


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("one_process", "folders whose tests one worker runs; those of an entry share it", type="linelist")


@contextmanager
def _limits(config: pytest.Config) -> Iterator[None]:
    """Have what runs meanwhile fail at its limits. Only in the main thread, as tests are."""
    seconds = float(config.getini("faulthandler_timeout") or 0)
    limits = (
        (signal.SIGPROF, signal.ITIMER_PROF, _PROCESSOR_SHARE * seconds, "seconds of processor time"),
        (signal.SIGALRM, signal.ITIMER_REAL, _TIME_SHARE * seconds, "seconds"),
    )

    def end(number: int, frame: Any) -> None:
        limit, unit = next((limit, unit) for of_limit, _, limit, unit in limits if of_limit == number)
        faulthandler.dump_traceback(sys.__stderr__)
        if config.getini("faulthandler_exit_on_timeout"):  # from now on again: what has failed still has to end
            faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
        pytest.fail(f"no end within {limit:g} {unit}, the limit of a test; stderr has the tracebacks of all threads")

    before = {number: signal.signal(number, end) for number, _, _, _ in limits}
    try:
        for _, timer, limit, _ in limits:
            signal.setitimer(timer, limit)
        yield
    finally:
        for number, timer, _, _ in limits:
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """Limit the fixtures; where other workers do, give way to tests that share a process."""
    if hasattr(item.config, "workerinput") and _shared_folder(item.config, item.nodeid) is None:
        os.nice(max(0, _NICENESS - os.nice(0)))
    with _limits(item.config):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Limit the test."""
    with _limits(item.config):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Limit the end of the fixtures."""
    with _limits(item.config):
        return (yield)


def _shared_folder(config: pytest.Config, nodeid: str) -> str | None:
    """Return the first folder of the entry of `one_process` that has a test; None: none does."""
    entries = [entry.split() for entry in config.getini("one_process")]
    found = (entry[0] for entry in entries if nodeid.startswith(tuple(f"{folder}/" for folder in entry)))
    return next(found, None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return how files are spread over workers: as pytest-xdist does it, but for the work of a worker that has ended.

    pytest-xdist 3.8 runs the test that ended it again, which ends the next one, too. It also hands over what was done
    already, for which the next one waits for ever (its issues 1323, 1327 and 1378).
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _shared_folder(config, nodeid) or str(super()._split_scope(nodeid))

        def remove_node(self, node: Any) -> str | None:
            work = self.assigned_work[node]
            left = [(file, name) for file, tests in work.items() for name, is_done in tests.items() if not is_done]
            self.assigned_work[node] = {}
            for file, name in left[1:]:  # the first one was running
                self.assigned_work[node].setdefault(file, {})[name] = False
            super().remove_node(node)
            return left[0][1] if left else None

        def _assign_work_unit(self, node: Any) -> None:
            with suppress(OSError):  # it has ended: `remove_node` follows, and gives this work to others
                super()._assign_work_unit(node)

        def _reschedule(self, node: Any) -> None:
            if node not in self.registered_collections:
                return  # it does not know its tests yet
            super()._reschedule(node)
            # A worker begins a test once it has the next one.
            while self.workqueue and not node.shutting_down and self._pending_of(self.assigned_work[node]) <= 2:
                super()._reschedule(node)

    return Scheduling(config, log)

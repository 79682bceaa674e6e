"""What ends an engine that nobody closed: at the latest at exit, and only in the process that opened it."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable


class ExitHook:
    """Ends what an owner has open: when called, when nobody holds the owner any more, or at exit; once.

    A forked child inherits the hook and the owner, but neither the threads nor the connections behind them: there it
    does nothing.
    """

    def __init__(self, owner: object, end: Callable[[], object]) -> None:
        """Begin to watch the owner.

        Args:
            owner: Whose end is waited for.
            end: What to do then. It must not hold the owner.
        """
        self._finalizer = weakref.finalize(owner, _end_in_process, os.getpid(), end)
        self._pid = os.getpid()
        # Not the finalizer's own exit hook: that one may run after Ray's, with nothing left to talk to.
        self._finalizer.atexit = False
        atexit.register(self._finalizer)

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a fork of the one that opened it."""
        return os.getpid() != self._pid

    def __call__(self) -> None:
        """Do it now. Later calls do nothing."""
        atexit.unregister(self._finalizer)
        self._finalizer()


def _end_in_process(pid: int, end: Callable[[], object]) -> None:
    if os.getpid() == pid:
        end()

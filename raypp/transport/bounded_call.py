"""Calling a library that has no deadlines of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

ResultT = TypeVar("ResultT")


class BoundedCall(Generic[ResultT]):
    """Runs a function on a thread of its own, which is left behind when it does not come back.

    Args:
        function: What to call.
        name: Of the thread.
    """

    def __init__(self, function: Callable[[], ResultT], name: str) -> None:
        self._function = function
        self._results: list[ResultT] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def result(self, timeout_s: float) -> ResultT:
        """Return what the function returned.

        Raises:
            TimeoutError: it did not come back in time.
            BaseException: whatever it raised.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"{self._thread.name} did not come back within {timeout_s:.1f} s")
        if self._error is not None:
            raise self._error
        return self._results[0]

    def _run(self) -> None:
        try:
            self._results.append(self._function())
        except BaseException as error:  # handed to whoever asks for the result
            self._error = error

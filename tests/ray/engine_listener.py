"""Hears what becomes of an engine."""

from __future__ import annotations

import threading
from collections.abc import Callable

from raypp.errors import RayppError

WAIT_S = 60.0  # for what is expected; only a hang takes this long


class EngineListener:
    """Notes what a watcher hears; words are `lost`, `back` and `dead`."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.errors: list[RayppError] = []
        self._changed = threading.Condition()

    def engine_lost(self, error: RayppError) -> None:
        self._note("lost", error)

    def engine_back(self, client_address: str, *, is_explained: bool) -> None:
        self._note("back", None)

    def engine_dead(self, error: RayppError) -> None:
        self._note("dead", error)

    def hears(self, *words: str, after: Callable[[], object]) -> None:
        """Do something, and wait until these words have come since."""
        num_before = len(self.words)
        after()
        with self._changed:
            assert self._changed.wait_for(lambda: self.words[num_before:] == list(words), WAIT_S), self.errors

    def _note(self, word: str, error: RayppError | None) -> None:
        with self._changed:
            self.words.append(word)
            self.errors += [] if error is None else [error]
            self._changed.notify_all()

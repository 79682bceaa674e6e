"""Requests that wait while there is no engine that would limit what they take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

from raypp.api.running_request import RunningRequest
from raypp.config.engine_config import EngineConfig
from raypp.errors import RayppError, RequestError
from raypp.request_memory import RequestMemory


class WaitingRoom:
    """Counts a client's requests against the limits that the engine has for those of all clients.

    Args:
        config: Of the engine.
        requests: Those that it had; they stay, whether there is room or not.
    """

    def __init__(self, config: EngineConfig, requests: Iterable[RunningRequest]) -> None:
        self._memory = RequestMemory(
            max_bytes=config.scheduler.max_waiting_bytes, max_pixel_bytes=config.encoder.max_waiting_pixel_bytes
        )
        for request in requests:
            with suppress(RequestError):  # there never was room, which it was about to be told
                self._add(request, is_new=False)

    def enter(self, requests: Sequence[RunningRequest]) -> None:
        """Have new requests wait, all or none.

        Raises:
            QueueFullError: there is no room now.
            RequestError: there never is for one of them.
        """
        try:
            for request in requests:
                self._add(request, is_new=True)
        except RayppError:
            for request in requests:
                self.leave(request)
            raise

    def leave(self, request: RunningRequest) -> None:
        """Take in that a request has ended; one that is not here is ignored."""
        for completion in request.completions:
            self._memory.remove(completion.engine_id)

    def _add(self, request: RunningRequest, *, is_new: bool) -> None:
        for completion in request.unfinished:
            self._memory.add(completion.engine_id, request.prepared.request, is_new=is_new)

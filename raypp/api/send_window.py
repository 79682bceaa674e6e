"""How much of a long list is sent to the engine at once: it refuses what it has no room for.

What is not sent waits here, with the caller, who holds it anyway.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from raypp.api.running_request import PreparedRequest
from raypp.config.engine_config import EngineConfig
from raypp.prompt_items import unique_items
from raypp.request import Request
from raypp.request_memory import REQUEST_BYTES


class SendWindow:
    """The requests of one list, handed out in order as the engine gets room for them.

    Half of what the engine may hold is for others. A request that is larger than that goes alone.

    Args:
        prepared: The list.
        config: Of the engine.
    """

    def __init__(self, prepared: Sequence[PreparedRequest], config: EngineConfig) -> None:
        self._waiting = deque(prepared)
        self._max_bytes = config.scheduler.max_waiting_bytes // 2
        self._max_pixel_bytes = config.encoder.max_waiting_pixel_bytes // 2
        self._sizes: dict[str, tuple[int, int]] = {}  # of those sent and not ended: request and pixels
        self._num_bytes = self._num_pixel_bytes = 0

    def take(self) -> list[PreparedRequest]:
        """Return the next ones that may be sent."""
        taken = []
        while self._waiting:
            size, pixel_size = _sizes_of(self._waiting[0].request)
            if self._sizes and (
                self._num_bytes + size > self._max_bytes or self._num_pixel_bytes + pixel_size > self._max_pixel_bytes
            ):
                break
            prepared = self._waiting.popleft()
            self._sizes[prepared.request.request_id] = size, pixel_size
            self._num_bytes += size
            self._num_pixel_bytes += pixel_size
            taken.append(prepared)
        return taken

    def note_ended(self, request_id: str) -> None:
        """Take in that a request that was sent has ended."""
        size, pixel_size = self._sizes.pop(request_id)
        self._num_bytes -= size
        self._num_pixel_bytes -= pixel_size


def _sizes_of(request: Request) -> tuple[int, int]:
    items = () if request.items is None else unique_items(request.items.items)
    return (
        request.params.n * (REQUEST_BYTES + request.prompt_token_ids.nbytes),
        sum(item.patches.nbytes for item in items),
    )

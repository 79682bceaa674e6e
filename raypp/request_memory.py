"""The memory of requests that wait or run, and its limits: in the driver, and in a client while its engine restarts.

Steps of a request take blocks of the KV cache, which are planned. What waits takes what it brought: its prompt, its
parameters, its images. An image that several requests bring counts once.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from raypp.errors import QueueFullError, RequestError
from raypp.prompt_items import EncoderItem, PromptItems, unique_items
from raypp.request import Request

REQUEST_BYTES = 4096
"""What a request takes in the driver beside its prompt and its images, counted generously."""

_RETRY_AFTER_S = 3


@dataclass(slots=True)
class _Pixels:
    item: EncoderItem
    num_requests: int = 0


class RequestMemory:
    """Counts what requests take.

    Args:
        max_bytes: What prompts and requests may take: 4 bytes per prompt token, and `REQUEST_BYTES` per request.
        max_pixel_bytes: What their images may.
    """

    def __init__(self, *, max_bytes: int, max_pixel_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_pixel_bytes = max_pixel_bytes
        self._requests: dict[Hashable, tuple[int, PromptItems | None]] = {}
        self._pixels: dict[bytes, _Pixels] = {}
        self.num_bytes = 0
        """That requests take, without pixels."""
        self.num_pixel_bytes = 0
        """Of their images."""

    def add(self, key: Hashable, request: Request, *, is_new: bool = True) -> PromptItems | None:
        """Count a request; return its images, those that are counted already as the objects that came first.

        Args:
            key: What it is removed by.
            request: It.
            is_new: Whether it can be told to come later. One that was admitted before is counted all the same.

        Raises:
            QueueFullError: there is no room for a new one now.
            RequestError: there never is.
        """
        request_id, items, size = request.request_id, request.items, REQUEST_BYTES + request.prompt_token_ids.nbytes
        used, limit = self.num_bytes, self._max_bytes
        _check_room(request_id, "memory of unfinished requests", size, used, "max_waiting_bytes", limit, is_new=is_new)
        if items is not None:
            items = self._add_pixels(request_id, items, is_new=is_new)
        self._requests[key] = size, items
        self.num_bytes += size
        return items

    def remove(self, key: Hashable) -> bool:
        """Forget a request; return whether it was counted."""
        if (counted := self._requests.pop(key, None)) is None:
            return False
        size, items = counted
        self.num_bytes -= size
        for item in () if items is None else unique_items(items.items):
            pixels = self._pixels[item.key]
            pixels.num_requests -= 1
            if not pixels.num_requests:
                del self._pixels[item.key]
                self.num_pixel_bytes -= pixels.item.patches.nbytes
        return True

    def _add_pixels(self, request_id: str, items: PromptItems, *, is_new: bool) -> PromptItems:
        unique = unique_items(items.items)
        new = [item for item in unique if item.key not in self._pixels]
        size = sum(item.patches.nbytes for item in new)
        used, limit = self.num_pixel_bytes, self._max_pixel_bytes
        _check_room(request_id, "memory of waiting images", size, used, "max_waiting_pixel_bytes", limit, is_new=is_new)
        for item in new:
            self._pixels[item.key] = _Pixels(item)
        self.num_pixel_bytes += size
        for item in unique:
            self._pixels[item.key].num_requests += 1
        return replace(items, items=tuple(self._pixels[item.key].item for item in items.items))


def _check_room(request_id: str, what: str, size: int, used: int, name: str, limit: int, *, is_new: bool) -> None:
    """Check that there is room for a request's `size` bytes.

    Raises:
        QueueFullError, RequestError: see `RequestMemory.add`.
    """
    if not size or used + size <= limit or (size <= limit and not is_new):
        return
    expected = f"at most {name} = {limit}"
    if size <= limit:
        raise QueueFullError(
            f"the {what} is full",
            retry_after_s=_RETRY_AFTER_S,
            got=f"{size} bytes more, {used} in use",
            expected=expected,
            hint=f"wait until others have ended, or raise {name}",
        )
    raise RequestError(
        f"the request does not fit into the {what}",
        request_id=request_id,
        got=f"{size} bytes",
        expected=expected,
        hint=f"send less in one request, or raise {name}",
    )

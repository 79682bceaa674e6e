"""Keeps the unfinished requests of all clients, and limits the memory that they take in the driver.

Steps of a request take blocks of the KV cache, which are planned; a request that waits takes what it brought: its
prompt, its parameters, its images. Pixels stay until the request ends, for it may be preempted, and its images then
be encoded once more. An image that several requests bring is kept once.

A request that an engine before this one has begun was admitted there: it is counted, and not refused because others
were here first. Output tokens are not counted, neither those that it brings nor those that it gets: only who has had a
row has any.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from raypp.client_messages import REQUEST_BYTES
from raypp.errors import QueueFullError, RequestError
from raypp.prompt_items import EncoderItem, unique_items
from raypp.scheduler.request import Request

_SMALL_ARRAY_BYTES = 1 << 14
"""A smaller array is copied from its message: it may be a corner of a buffer of zmq, and would keep that in memory."""

_RETRY_AFTER_S = 3


@dataclass(slots=True)
class _Pixels:
    item: EncoderItem
    num_requests: int = 0


class OpenRequests:
    """Requests by client and id.

    Args:
        max_bytes: What prompts and requests may take: 4 bytes per prompt token, and `REQUEST_BYTES` per request.
        max_pixel_bytes: What their images may.
    """

    def __init__(self, *, max_bytes: int, max_pixel_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_pixel_bytes = max_pixel_bytes
        self._of_client: dict[bytes, dict[str, Request]] = {}
        self._sizes: dict[Request, int] = {}
        self._pixels: dict[bytes, _Pixels] = {}
        self.num_bytes = 0
        """That unfinished requests take, without pixels."""
        self.num_pixel_bytes = 0
        """Of the images of unfinished requests."""

    @property
    def clients(self) -> Iterable[bytes]:
        """The clients that are there."""
        return self._of_client

    def __contains__(self, client: bytes) -> bool:
        return client in self._of_client

    def open_client(self, client: bytes) -> None:
        """Take in a client; one that is known stays as it is."""
        self._of_client.setdefault(client, {})

    def close_client(self, client: bytes) -> list[Request]:
        """Forget a client; return its requests, which count until they are removed."""
        return list(self._of_client.pop(client, {}).values())

    def find(self, client: bytes, request_id: str) -> Request | None:
        """Return a client's unfinished request; None if there is none of this id."""
        return self._of_client.get(client, {}).get(request_id)

    def admit(self, request: Request) -> None:
        """Count a new request. Its images become those that are kept already, where they are the same.

        Raises:
            QueueFullError: there is no room for it now, and no engine has begun it.
            RequestError: there never is, or the client has an unfinished one of the same id.
        """
        if self.find(request.client, request.request_id) is not None:
            raise RequestError(
                "a request with this id is unfinished",
                request_id=request.request_id,
                got=request.request_id,
                expected="an id of its own",
            )
        size = REQUEST_BYTES + request.prompt_token_ids.nbytes
        _check_room(
            request, "memory of unfinished requests", size, self.num_bytes, "max_waiting_bytes", self._max_bytes
        )
        if request.items is not None:
            self._admit_pixels(request)
        self._of_client.setdefault(request.client, {})[request.request_id] = request
        self._sizes[request] = size
        self.num_bytes += size

    def remove(self, request: Request) -> None:
        """Forget a request that has ended; one that was forgotten already is ignored."""
        if (size := self._sizes.pop(request, None)) is None:
            return
        self.num_bytes -= size
        of_client = self._of_client.get(request.client, {})
        if of_client.get(request.request_id) is request:
            del of_client[request.request_id]
        if request.items is not None:
            for item in unique_items(request.items.items):
                pixels = self._pixels[item.key]
                pixels.num_requests -= 1
                if not pixels.num_requests:
                    del self._pixels[item.key]
                    self.num_pixel_bytes -= pixels.item.patches.nbytes

    def _admit_pixels(self, request: Request) -> None:
        assert request.items is not None
        items = unique_items(request.items.items)
        new = [item for item in items if item.key not in self._pixels]
        size = sum(item.patches.nbytes for item in new)
        limit = self._max_pixel_bytes
        _check_room(request, "memory of waiting images", size, self.num_pixel_bytes, "max_waiting_pixel_bytes", limit)
        for item in new:
            self._pixels[item.key] = _Pixels(_without_buffer(item))
        self.num_pixel_bytes += size
        for item in items:
            self._pixels[item.key].num_requests += 1
        kept = tuple(self._pixels[item.key].item for item in request.items.items)
        request.items = replace(request.items, items=kept)


def _without_buffer(item: EncoderItem) -> EncoderItem:
    if item.patches.nbytes >= _SMALL_ARRAY_BYTES:
        return item
    return replace(item, patches=np.array(item.patches))


def _check_room(request: Request, what: str, size: int, used: int, name: str, limit: int) -> None:
    """Check that there is room for a request's `size` bytes.

    Raises:
        QueueFullError, RequestError: see `OpenRequests.admit`.
    """
    if not size or used + size <= limit or (size <= limit and request.num_earlier_tokens):
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
        request_id=request.request_id,
        got=f"{size} bytes",
        expected=expected,
        hint=f"send less in one request, or raise {name}",
    )

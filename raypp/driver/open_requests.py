"""Keeps the unfinished requests of all clients, and limits the memory that they take in the driver.

Pixels stay until the request ends, for it may be preempted, and its images then be encoded once more. An image that
several requests bring is kept once.

A request that an engine before this one has begun was admitted there: it is counted, and not refused because others
were here first. Output tokens are not counted, neither those that it brings nor those that it gets: only who has had a
row has any.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from raypp.errors import RequestError
from raypp.prompt_items import EncoderItem, PromptItems
from raypp.request import Request
from raypp.request_memory import RequestMemory

_SMALL_ARRAY_BYTES = 1 << 14
"""A smaller array is copied from its message: it may be a corner of a buffer of zmq, and would keep that in memory."""


class OpenRequests:
    """Requests by client and id.

    Args:
        max_bytes: What prompts and requests may take; see `RequestMemory`.
        max_pixel_bytes: What their images may.
    """

    def __init__(self, *, max_bytes: int, max_pixel_bytes: int) -> None:
        self._memory = RequestMemory(max_bytes=max_bytes, max_pixel_bytes=max_pixel_bytes)
        self._of_client: dict[bytes, dict[str, Request]] = {}

    @property
    def num_bytes(self) -> int:
        """That unfinished requests take, without pixels."""
        return self._memory.num_bytes

    @property
    def num_pixel_bytes(self) -> int:
        """Of the images of unfinished requests."""
        return self._memory.num_pixel_bytes

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
        if request.items is not None:
            request.items = _without_buffers(request.items)
        request.items = self._memory.add(request, request, is_new=not request.num_earlier_tokens)
        self._of_client.setdefault(request.client, {})[request.request_id] = request

    def remove(self, request: Request) -> None:
        """Forget a request that has ended; one that was forgotten already is ignored."""
        if self._memory.remove(request):
            of_client = self._of_client.get(request.client, {})
            if of_client.get(request.request_id) is request:
                del of_client[request.request_id]


def _without_buffers(items: PromptItems) -> PromptItems:
    return replace(items, items=tuple(map(_without_buffer, items.items)))


def _without_buffer(item: EncoderItem) -> EncoderItem:
    if item.patches.nbytes >= _SMALL_ARRAY_BYTES:
        return item
    return replace(item, patches=np.array(item.patches))

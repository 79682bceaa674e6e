"""The memory that unfinished requests may take, and what is kept of their pictures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from raypp.driver.server import OpenRequests
from raypp.errors import QueueFullError, RequestError
from raypp.prompt_items import EncoderItem, PromptItems
from raypp.request import REQUEST_BYTES, Request
from raypp.types import SamplingParams

PARAMS = SamplingParams()
PICTURE_BYTES = 4 * 300


def _picture(number: int, scale: int = 1) -> PromptItems:
    patches = np.full((4 * scale, 300), number, np.uint8)
    return PromptItems((EncoderItem.of(patches, (1, 2, 2 * scale), scale),) * 2, (0, scale), merge_size=2)


def _request(
    name: str,
    *,
    num_tokens: int = 8,
    items: PromptItems | None = None,
    client: bytes = b"c",
    begun: Sequence[int] = (),
) -> Request:
    prompt = np.zeros(num_tokens, np.int32)
    return Request(name, prompt, PARAMS, 0, items=items, client=client, output_token_ids=list(begun))


def test_a_request_for_which_there_is_no_room_is_told_the_limit_and_may_come_later():
    limit = 2 * (REQUEST_BYTES + 32)
    requests = OpenRequests(max_bytes=limit, max_pixel_bytes=1)
    first, second, third = (_request(name) for name in "abc")
    requests.admit(first)
    requests.admit(second)
    assert requests.memory.num_bytes == limit
    with pytest.raises(QueueFullError, match=f"max_waiting_bytes = {limit}") as caught:
        requests.admit(third)
    assert str(limit) in str(caught.value.got)
    requests.remove(first)
    requests.remove(first)
    requests.admit(third)
    with pytest.raises(RequestError, match="max_waiting_bytes") as caught:
        requests.admit(_request("long", num_tokens=limit // 4))
    assert not isinstance(caught.value, QueueFullError), "it would be refused at any time"


def test_pixels_are_counted_once_per_picture_and_limited():
    requests = OpenRequests(max_bytes=1 << 20, max_pixel_bytes=2 * PICTURE_BYTES)
    same = [_request(f"r{i}", items=_picture(1)) for i in range(3)]
    for request in same:
        requests.admit(request)
    assert requests.memory.num_pixel_bytes == PICTURE_BYTES
    assert len({id(item.patches) for request in same for item in request.items.items}) == 1
    requests.admit(_request("other", items=_picture(2)))
    with pytest.raises(QueueFullError, match=f"max_waiting_pixel_bytes = {2 * PICTURE_BYTES}"):
        requests.admit(_request("too much", items=_picture(3)))
    with pytest.raises(RequestError, match="max_waiting_pixel_bytes") as caught:
        requests.admit(_request("too large", items=_picture(3, scale=3)))
    assert not isinstance(caught.value, QueueFullError)
    assert requests.find(b"c", "too much") is None
    for request in same:
        requests.remove(request)
    assert requests.memory.num_pixel_bytes == PICTURE_BYTES
    requests.admit(_request("too much", items=_picture(3)))


def test_a_request_that_was_begun_elsewhere_is_counted_and_not_refused_because_others_were_first():
    limit = 2 * (REQUEST_BYTES + 32)
    requests = OpenRequests(max_bytes=limit, max_pixel_bytes=PICTURE_BYTES)
    for name in "ab":
        requests.admit(_request(name))
    requests.admit(begun := _request("begun", items=_picture(1), begun=[5]))
    assert requests.memory.num_bytes == 3 * (REQUEST_BYTES + 32)
    requests.admit(_request("also begun", items=_picture(2), begun=[5]))
    assert requests.memory.num_pixel_bytes == 2 * PICTURE_BYTES
    with pytest.raises(QueueFullError):
        requests.admit(_request("c"))
    with pytest.raises(RequestError, match="max_waiting_bytes"):
        requests.admit(_request("long", num_tokens=limit // 4, begun=[5]))
    requests.remove(begun)
    assert requests.memory.num_bytes == 3 * (REQUEST_BYTES + 32)
    assert requests.memory.num_pixel_bytes == PICTURE_BYTES


def test_a_small_picture_does_not_keep_the_message_that_brought_it():
    message = np.zeros(1 << 20, np.uint8)
    item = EncoderItem(b"k" * 16, message[:PICTURE_BYTES].reshape(4, 300), (1, 2, 2), 1)
    requests = OpenRequests(max_bytes=1 << 20, max_pixel_bytes=1 << 20)
    request = _request("a", items=PromptItems((item,), (0,), merge_size=2))
    requests.admit(request)
    assert request.items.items[0].patches.base is None


def test_the_requests_of_a_client_that_leaves_count_until_they_are_removed():
    requests = OpenRequests(max_bytes=1 << 20, max_pixel_bytes=1)
    requests.of_client.setdefault(b"c", {})
    ours, theirs = _request("a"), _request("a", client=b"d")
    requests.admit(ours)
    requests.admit(theirs)
    with pytest.raises(RequestError, match="id is unfinished"):
        requests.admit(_request("a"))
    assert [*requests.of_client.pop(b"c").values()] == [ours]
    assert requests.memory.num_bytes == 2 * (REQUEST_BYTES + 32)
    requests.remove(ours)
    assert requests.find(b"d", "a") is theirs
    assert list(requests.of_client) == [b"d"]

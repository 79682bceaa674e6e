"""No more pixels at once than there is room for: others wait, in order and not for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from raypp.config.sections import ImagesSection
from raypp.errors import QueueFullError, RequestError
from raypp.openai_api.error_bodies import describe_error
from raypp.pictures.reader import PixelRoom


def _room(limit: int, timeout_s: float = 60.0) -> PixelRoom:
    return PixelRoom(ImagesSection(max_pixels_in_flight=limit, image_wait_timeout_s=timeout_s))


def _wait_until(condition: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < ends_s
        threading.Event().wait(0.001)


def test_what_never_fits_is_refused_and_what_does_not_fit_now_waits_in_vain_for_a_while() -> None:
    room = _room(10, 0.02)
    with pytest.raises(RequestError, match=r"11 pixels.*max_pixels_in_flight = 10"), room.hold(11):
        pass
    with room.hold(8), pytest.raises(QueueFullError, match=r"8 of other requests.*= 0.02 s") as caught, room.hold(3):
        pass
    assert describe_error(caught.value)[0] == 429
    with room.hold(10):
        assert room.num_held == 10
    assert room.num_held == 0


def test_a_large_one_is_not_overtaken_for_ever_by_small_ones() -> None:
    room, order, threads = _room(10), list[str](), list[threading.Thread]()
    is_in, go_on = threading.Event(), threading.Event()

    def enter(name: str, num_pixels: int) -> None:
        with room.hold(num_pixels):
            order.append(name)
            if name == "first":
                is_in.set()
                assert go_on.wait(60)

    for number, (name, num_pixels) in enumerate((("first", 5), ("large", 10), ("small", 1))):
        threads.append(threading.Thread(target=enter, args=(name, num_pixels)))
        threads[-1].start()
        assert is_in.wait(60)
        _wait_until(lambda expected=number: room.num_waiting == expected)  # type: ignore[misc]
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert order == ["first", "large", "small"]

"""Pictures beside an event loop: fetched side by side, and slow sites hold up neither pictures nor texts."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from raypp.config.sections import ImagesSection
from raypp.errors import RequestError
from raypp.pictures.fetch import Fetcher
from raypp.pictures.reader import ImageThreads

DATA = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
TEXT = {"type": "text", "text": "http://a.example/"}


class _Site(Fetcher):
    """Answers with the address when as many ask at once as are awaited."""

    def __init__(self, num_awaited: int, **limits: Any) -> None:
        super().__init__(ImagesSection.model_validate({"allow_image_urls": True, **limits}))
        object.__setattr__(self, "all_here", threading.Barrier(num_awaited))
        object.__setattr__(self, "asked", [])

    def fetch(self, url: str) -> bytes:
        self.asked.append(url)  # type: ignore[attr-defined]
        self.all_here.wait(60)  # type: ignore[attr-defined]
        return url.encode()


def _address(name: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"http://{name}.example/"}}


def _of(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "system", "content": "s"}, {"role": "user", "content": [*parts]}]


def test_addresses_are_fetched_side_by_side_each_once_and_everything_else_stays() -> None:
    video = {"type": "video", "video": ["http://b.example/", b"x"], "fps": 1.0}
    image = {"type": "image", "image": "HTTP://c.example/"}
    site = _Site(3)
    messages = _of(TEXT, _address("a"), DATA, video, image, _address("a"))
    got = asyncio.run(ImageThreads(site).messages(messages, lambda given: given))
    a = {"type": "image", "image": b"http://a.example/"}
    b = {"type": "video", "video": [b"http://b.example/", b"x"], "fps": 1.0}
    assert got == _of(TEXT, a, DATA, b, {"type": "image", "image": b"HTTP://c.example/"}, a)
    assert len(site.asked) == 3  # type: ignore[attr-defined]


def test_prompts_with_images() -> None:
    prompts = ["http://a.example/", {"prompt": "p", "multi_modal_data": {"image": ["http://b.example/", b"x"]}}]
    prompts += [{"prompt": "p", "multi_modal_data": {"image": "http://b.example/"}}, {"prompt_token_ids": [1]}]
    got = asyncio.run(ImageThreads(_Site(1)).prompts(prompts, lambda given: given))
    assert [got[0], got[3]] == [prompts[0], prompts[3]]
    assert got[1]["multi_modal_data"] == {"image": [b"http://b.example/", b"x"]}
    assert got[2]["multi_modal_data"] == {"image": [b"http://b.example/"]}


def test_too_many_are_refused_before_the_first_is_fetched() -> None:
    site = _Site(1, max_images_per_prompt=2)
    for images in ([_address("a")] * 3, [_address("a"), {"type": "video", "video": [b"x"] * 2}]):
        with pytest.raises(RequestError, match="max_images_per_prompt = 2"):
            asyncio.run(ImageThreads(site).messages(_of(*images), lambda given: given))
    bad = {"type": "image_url", "image_url": {"url": "http://a..example/"}}
    with pytest.raises(RequestError, match="not an image's address"):
        asyncio.run(ImageThreads(site).messages(_of(_address("a"), bad), lambda given: given))
    assert site.asked == []  # type: ignore[attr-defined]


def test_slow_sites_hold_up_neither_pictures_nor_texts() -> None:
    site = _Site(6, max_image_fetches=5)
    beside = ImageThreads(site)

    async def run() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        slow = [asyncio.create_task(beside.messages(_of(_address(f"a{i}")), lambda given: given)) for i in range(8)]
        await asyncio.sleep(0)
        async with asyncio.timeout(60):
            assert await beside.messages(_of(DATA), lambda given: given) == _of(DATA)
            assert await asyncio.to_thread(lambda: "tokenized") == "tokenized"
        assert not any(task.done() for task in slow)
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        site.all_here.abort()  # type: ignore[attr-defined]

    asyncio.run(run())
    assert len(site.asked) <= 5  # type: ignore[attr-defined]

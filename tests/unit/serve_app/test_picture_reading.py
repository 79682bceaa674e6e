"""How many requests may have their pictures read at once, and for how long; texts do not notice."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from raypp.api.tokenizer import Tokenizer
from raypp.config.sections import ImagesSection
from raypp.errors import QueueFullError, RequestError
from raypp.models.config import load_model_config
from raypp.models.registry import resolve_model_path
from raypp.openai_api.body_preparer import BodyPreparer
from raypp.openai_api.chat_request import ChatRequest
from raypp.pictures.fetch import Fetcher, TimedLookups
from raypp.pictures.reader import PictureReader
from serve_app.runner import ReadingGate

TEXT = {"type": "text", "text": "What?"}
ADDRESS = {"type": "image_url", "image_url": {"url": "http://slow.example/a.png"}}
BAD = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}


def _of(*parts: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": [*parts, TEXT]}]})


def _preparer(hang: threading.Event, **limits: Any) -> BodyPreparer:
    def resolve(host: str, port: int) -> list[str]:
        assert hang.wait(60)
        return ["127.0.0.1"]

    path = resolve_model_path("tiny-vl")
    vision = load_model_config(path).vision
    assert vision is not None
    section = ImagesSection.model_validate({"allow_image_urls": True, **limits})
    pictures = PictureReader(vision, 512, Fetcher(section, TimedLookups(resolve)))
    gate = ReadingGate(2, section.image_wait_timeout_s)
    return BodyPreparer(Tokenizer(path), pictures, max_model_len=512, reading=gate.entered)


def test_a_request_more_than_may_be_read_is_told_to_come_back() -> None:
    hang = threading.Event()
    preparer = _preparer(hang)

    async def run() -> None:
        slow = [asyncio.create_task(preparer.conversation(_of(ADDRESS))) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match=r"2 requests.*max_encodes \+ max_encodes_waiting = 2"):
            await preparer.conversation(_of(BAD))
        text = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x" * 20_000}]})
        assert (await preparer.conversation(text)).token_ids.size
        hang.set()
        for task in slow:
            with pytest.raises(RequestError, match="not a public one"):
                await task
        with pytest.raises(RequestError, match="not an image"):
            await preparer.conversation(_of(BAD))

    asyncio.run(run())


def test_pictures_that_are_not_read_in_time_are_refused() -> None:
    hang = threading.Event()

    async def run() -> None:
        with pytest.raises(QueueFullError, match=r"not read in time.*image_wait_timeout_s = 0\.05 s"):
            await _preparer(hang, image_wait_timeout_s=0.05).conversation(_of(ADDRESS))

    asyncio.run(run())
    hang.set()

"""Pictures beside an event loop: fetched on some threads, decoded on others; neither are those that tokenize texts.

    messages --fetch, side by side--> messages with files --prepare, a prompt at a time and thread--> requests

So slow sites keep no image that is there already from being read, and no text from being tokenized.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from raypp.pictures.content import check_number, sources_as_contents, sources_of, take_pictures, with_files
from raypp.pictures.fetch import Fetcher
from raypp.pictures.web_address import is_web_address

T = TypeVar("T")

_NICENESS = 10  # more than the process itself has
_MOST_NICENESS = 19
_MAX_DECODING = 8
"""Threads that decode. More would take time from what else the process does, its event loop above all."""


class PicturesBeside:
    """Threads for images. They are started when they are first needed.

    Args:
        fetcher: Fetches addresses.
    """

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher
        self._fetches = ThreadPoolExecutor(fetcher.limits.max_image_fetches, "fetch")
        num_threads = min(_MAX_DECODING, os.cpu_count() or 1)
        self._decoders = ThreadPoolExecutor(num_threads, "pictures", initializer=_step_aside)

    async def messages(self, messages: Sequence[Mapping[str, Any]], prepare: Callable[[Any], T]) -> T:
        """Fetch what a conversation names by addresses; then call `prepare` with the conversation on a thread.

        Args:
            messages: Given to `prepare` with files in the place of addresses.
            prepare: Reads its images.

        Raises:
            RequestError: an address is not allowed, cannot be fetched, or `prepare` raises it.
        """
        if all(isinstance(message, Mapping) for message in messages):  # else `prepare` says what is wrong
            _, contents = take_pictures(messages)
            check_number(contents, self._fetcher.limits)
            files = await self._files(source for content in contents for source in sources_of(content))
            messages = with_files(messages, files) if files else messages
        return await self._run(partial(prepare, messages))

    async def prompts(self, prompts: Sequence[Any], prepare: Callable[[Any], T]) -> T:
        """Do the same for prompts, of which some have `multi_modal_data`."""
        for prompt in prompts:
            check_number(sources_as_contents(_images_of(prompt)), self._fetcher.limits)
        files = await self._files(image for prompt in prompts for image in _images_of(prompt))
        return await self._run(
            partial(prepare, [_with_files(prompt, files) for prompt in prompts] if files else prompts)
        )

    async def _files(self, sources: Iterable[Any]) -> dict[str, bytes]:
        """Return the files of all sources that are addresses, each fetched once."""
        urls = list(dict.fromkeys(source for source in sources if is_web_address(source)))
        for url in urls:
            self._fetcher.check(url)
        fetches = [asyncio.wrap_future(self._fetches.submit(self._fetcher.fetch, url)) for url in urls]
        try:
            return dict(zip(urls, await asyncio.gather(*fetches), strict=True))
        finally:
            for fetch in fetches:
                fetch.cancel()  # those that no thread has begun

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._decoders.submit(work))


def _step_aside() -> None:
    """Lower this thread's priority: on a busy machine steps go before images. Only Linux has such priorities."""
    if sys.platform == "linux":
        # Below the process's own, wherever that is: to take a higher one is not allowed to everybody.
        niceness = min(os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS, _MOST_NICENESS)
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


def _images_of(prompt: Any) -> Sequence[Any]:
    data = prompt.get("multi_modal_data") if isinstance(prompt, Mapping) else None
    images = data.get("image") if isinstance(data, Mapping) else None
    return images if isinstance(images, list | tuple) else [images]


def _with_files(prompt: Any, files: Mapping[str, bytes]) -> Any:
    images = _images_of(prompt)
    if not any(is_web_address(image) for image in images):
        return prompt
    filled = [files[image] if is_web_address(image) else image for image in images]
    return {**prompt, "multi_modal_data": {**prompt["multi_modal_data"], "image": filled}}

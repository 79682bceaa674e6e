"""The images of one model's requests: from what the user gave to items, and their marks in the prompt's text."""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
import re
import stat
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

from PIL import Image

from raypp.config.sections import ImagesSection
from raypp.errors import QueueFullError, RequestError
from raypp.models.vision_config import MarksInPrompts, VisionConfig
from raypp.pictures.content import (
    Content,
    ImageContent,
    check_number,
    sources_as_contents,
    sources_of,
    take_pictures,
    with_files,
)
from raypp.pictures.decode_picture import OpenedImage, check_bytes, open_array, open_file, open_pil
from raypp.pictures.fetch import Fetcher
from raypp.pictures.patches import filled_size, fitted_size, image_item, num_tokens_of, video_items
from raypp.pictures.web_address import is_web_address
from raypp.prompt_items import EncoderItem

_RETRY_AFTER_S = 5
_FORMS = "a PIL image, a path, the bytes of a file, or an array [height, width, 3] of uint8"

T = TypeVar("T")

_NICENESS = 10  # more than the process itself has
_MOST_NICENESS = 19
_MAX_DECODING = 8
"""Threads that decode. More would take time from what else the process does, its event loop above all."""


@dataclass(frozen=True)
class PictureMarks:
    """The model's own words for images, as text."""

    start: str  # before an image
    end: str  # behind it
    image: str  # stands for its tokens
    video: str  # stands for the tokens of a group of frames; empty: the model takes no videos
    in_prompts: MarksInPrompts = "all"


@dataclass(frozen=True, eq=False)
class ReadPicture:
    """An image, or a video."""

    items: tuple[EncoderItem, ...]  # of a video one per group of frames
    seconds: tuple[float, ...] | None = None  # of a video, when each of its groups is shown


class PictureReader:
    """Reads images for one model. May be used from several threads, which share one room for pixels.

    Args:
        config: Of the model's vision tower.
        max_model_len: The most tokens of a request.
        fetcher: Fetches addresses; its limits hold for every image.
    """

    def __init__(self, config: VisionConfig, max_model_len: int, fetcher: Fetcher) -> None:
        self.config = config
        self.beside = ImageThreads(fetcher)
        """For event loops, which must not block."""
        self._max_model_len = max_model_len
        self._fetcher = fetcher
        self.limits = fetcher.limits
        """What the configuration allows."""
        self._room = PixelRoom(fetcher.limits)

    def read(self, contents: Sequence[Content]) -> list[ReadPicture]:
        """Return what the encoder is given of a prompt's images, in order. Blocks while there is no room for them.

        All are opened, and their sizes checked, before the first one is decoded; then one is decoded at a time.

        Raises:
            RequestError: one cannot be read, is not allowed, or they are too many or too large.
            QueueFullError: other requests did not make room in time.
        """
        check_number(contents, self.limits)
        if self.config.video_token_id is None and not all(isinstance(content, ImageContent) for content in contents):
            raise RequestError("this model takes no videos", got="a video", expected="images and text")
        opened = self._opened(contents)
        self._check_tokens(contents, opened)
        with self._room.hold(sum(image.num_pixels for images in opened for image in images)):
            pictures = []
            for content, images in zip(contents, opened, strict=True):
                if isinstance(content, ImageContent):
                    pictures.append(self._image(images[0]))
                else:
                    pictures.append(self._video(images, content.fps))
            return pictures

    def mark_pictures(self, text: str, pictures: Sequence[ReadPicture], marks: PictureMarks) -> str:
        """Return a rendered prompt in which each video's mark is one per group of frames, and when it is shown.

        Where a start alone stands for an image, it gets the other marks, and empty lines around them: Gemma 3's
        (transformers 5.17, `processing_gemma3.py`). So does a placeholder, without empty lines: Gemma 4's. A video that
        the template put between its marks loses these: each group has its own.

        Raises:
            RequestError: there are not as many marks of videos as videos.
        """
        start, image = re.escape(marks.start), re.escape(marks.image)
        if marks.in_prompts != "all":  # but a prompt may have them all
            alone = f"{start}(?!{image})" if marks.in_prompts == "start" else f"(?<!{start}){image}"
            lines = "\n\n" if marks.in_prompts == "start" else ""
            return re.sub(alone, lambda _: f"{lines}{marks.start}{marks.image}{marks.end}{lines}", text)
        videos = [picture.seconds for picture in pictures if picture.seconds is not None]
        if not videos:
            return text
        parts = text.replace(f"{marks.start}{marks.video}{marks.end}", marks.video).split(marks.video)
        if len(parts) != len(videos) + 1:
            raise RequestError(
                "the number of video placeholders in the prompt differs from the number of videos",
                got=f"{len(parts) - 1} marks, {len(videos)} videos",
                expected="one for each",
                hint="text must not contain the model's own image placeholders",
            )
        marked = [parts[0]]
        for seconds, part in zip(videos, parts[1:], strict=True):
            marked += [f"<{second:.1f} seconds>{marks.start}{marks.video}{marks.end}" for second in seconds]
            marked.append(part)
        return "".join(marked)

    def _opened(self, contents: Sequence[Content]) -> list[list[OpenedImage]]:
        """Return the opened file of each image, or the frames of each video."""
        opened, num_bytes = [], 0
        for content in contents:
            images = []
            for source in sources_of(content):
                image = (
                    open_image_url(source, self._fetcher) if content.is_address else open_image(source, self._fetcher)
                )
                num_bytes += image.num_bytes
                self._check_bytes(num_bytes, "as they are handed in")
                images.append(image)
            opened.append(images)
        return opened

    def _check_tokens(self, contents: Sequence[Content], opened: Sequence[Sequence[OpenedImage]]) -> None:
        """Raise when the images need more tokens than there is room for, or more bytes."""
        config, room, num_bytes = self.config, self._max_model_len, 0
        for content, images in zip(contents, opened, strict=True):
            num_frames = None if isinstance(content, ImageContent) else len(images)
            width, height = images[0].size
            num_groups = 1 if num_frames is None else -(-num_frames // config.temporal_patch_size)
            num_tokens = num_groups * num_tokens_of(self._fitted_size(width, height, num_frames), config)
            if num_tokens >= room:
                raise RequestError(
                    "an image needs more tokens than the context has room for",
                    got=f"{num_tokens} tokens for {width} x {height}"
                    + ("" if num_frames is None else f" and {num_frames} frames"),
                    expected=f"fewer than {room} of max_model_len = {self._max_model_len}",
                    hint="make it smaller, or raise max_model_len",
                )
            room -= num_tokens
            num_bytes += num_tokens * config.patches_per_token * config.patch_dim
            self._check_bytes(num_bytes, "as patches")

    def _check_bytes(self, num_bytes: int, what: str) -> None:
        limit = self.limits.max_prompt_image_bytes
        if num_bytes > limit:
            raise RequestError(
                "the images of a prompt have too many bytes together",
                got=f"{num_bytes} bytes {what}",
                expected=f"at most max_prompt_image_bytes = {limit}",
                hint="make them smaller or fewer, or raise max_prompt_image_bytes",
            )

    def _image(self, opened: OpenedImage) -> ReadPicture:
        image, size = self._decoded(opened, None)
        return ReadPicture((image_item(image, size, self.config),))

    def _video(self, opened: Sequence[OpenedImage], fps: float) -> ReadPicture:
        first, size = self._decoded(opened[0], len(opened))

        def frames() -> Iterator[Image.Image]:
            yield first
            for other in opened[1:]:
                frame, fitted = self._decoded(other, len(opened))
                if (frame.size, fitted) != (first.size, size):
                    raise RequestError(
                        "the frames of a video differ in size", got=[first.size, frame.size], expected="one size"
                    )
                yield frame

        items, group = video_items(frames(), size, self.config), self.config.temporal_patch_size
        times = [index / fps for index in range(len(opened))]
        times += times[-1:] * (-len(times) % group)
        middles = tuple((times[at] + times[at + group - 1]) / 2 for at in range(0, len(times), group))
        return ReadPicture(tuple(items), middles)

    def _decoded(self, opened: OpenedImage, num_frames: int | None) -> tuple[Image.Image, tuple[int, int]]:
        """Return an image, upright, and the height and width that it is to be resized to."""
        width, height = opened.size
        rows, columns = self._fitted_size(width, height, num_frames)
        image = opened.decode((columns, rows))
        if opened.is_turned:
            rows, columns = self._fitted_size(height, width, num_frames)
        return image, (rows, columns)

    def _fitted_size(self, width: int, height: int, num_frames: int | None) -> tuple[int, int]:
        """Return the height and width that an image, or each of so many frames of a video, is resized to."""
        config = self.config
        if config.image_side is not None:
            return config.image_side, config.image_side
        bounds = config.image_pixels if num_frames is None else config.video_pixels
        if config.fills_bounds:
            return filled_size(height, width, config.side_factor, bounds.max_pixels)
        num_counted = 1 if num_frames is None else max(num_frames, config.temporal_patch_size)
        return fitted_size(height, width, config.side_factor, bounds, num_counted)


def open_image(source: Any, fetcher: Fetcher) -> OpenedImage:
    """Return what a user of the Python API gives as an image. A path is trusted: it is the user's own.

    Raises:
        RequestError: it is none, or too large.
    """
    limits = fetcher.limits
    if isinstance(source, Image.Image):
        return open_pil(source, limits)
    if isinstance(source, bytes | bytearray | memoryview):
        check_bytes(memoryview(source).nbytes, limits)
        return open_file(bytes(source), limits)
    if is_web_address(source) or _is_data(source):
        return open_image_url(source, fetcher)
    if isinstance(source, str | os.PathLike):
        return open_file(_read_file(Path(source), limits), limits)
    if hasattr(source, "__array__") or hasattr(source, "__array_interface__"):
        return open_array(source, limits)
    raise RequestError("not an image", got=type(source).__name__, expected=_FORMS)


def open_image_url(url: Any, fetcher: Fetcher) -> OpenedImage:
    """Return the image at an address; `data:` holds it itself, others are fetched if the configuration allows that.

    Raises:
        RequestError: not allowed, or no image.
    """
    if not isinstance(url, str):
        raise RequestError("not an image's address", got=type(url).__name__, expected="a string")
    data = _data_of(url, fetcher.limits) if _is_data(url) else fetcher.fetch(url)
    return open_file(data, fetcher.limits)


def _is_data(source: Any) -> bool:
    return isinstance(source, str) and source[:100].lstrip()[:5].lower() == "data:"


def _read_file(path: Path, limits: ImagesSection) -> bytes:
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # a pipe would be waited for, a device has no end
            raise RequestError("an image file cannot be read", got=f"{path}, which is no file", expected=_FORMS)
        check_bytes(found.st_size, limits, str(path))
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise RequestError("an image file cannot be read", got=error, expected=_FORMS) from error


def _data_of(url: str, limits: ImagesSection) -> bytes:
    """Return what a data address holds. Blanks, missing padding and percent signs are taken, as browsers do."""
    head, comma, text = url.partition(",")
    if not comma or not head.lower().rstrip().endswith("base64"):
        raise RequestError(
            "an image in a data address must be in base64", got=repr(url[:60]), expected="data:image/png;base64,..."
        )
    text = "".join((unquote(text) if "%" in text else text).split()).rstrip("=")
    check_bytes(len(text) * 3 // 4, limits)
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError("an image's base64 is broken", got=error, expected="A-Z, a-z, 0-9, + and /") from error


class ImageThreads:
    """Threads for images, beside an event loop and the threads that tokenize texts; started when first needed.

        messages --fetch, side by side--> messages with files --prepare, a prompt at a time and thread--> requests

    So slow sites delay no image that is there already, and images delay no text.

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
        # Below the process's own, wherever that is: a higher one needs privileges.
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


class PixelRoom:
    """Lets prompts in as long as there is room for their pixels, in the order in which they come. For many threads.

    Args:
        limits: What the configuration allows.
    """

    def __init__(self, limits: ImagesSection) -> None:
        self._limit = limits.max_pixels_in_flight
        self._timeout_s = limits.image_wait_timeout_s
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self.num_held = 0
        """Pixels of those that are in."""

    @property
    def num_waiting(self) -> int:
        """Prompts that wait."""
        return len(self._waiting)

    @contextmanager
    def hold(self, num_pixels: int) -> Iterator[None]:
        """Wait until there is room, and hold it. A thread that holds some must not ask for more.

        Raises:
            RequestError: there is never room for so many.
            QueueFullError: others did not make room in time.
        """
        if num_pixels > self._limit:
            raise RequestError(
                "the images of a prompt have too many pixels together",
                got=f"{num_pixels} pixels",
                expected=f"at most max_pixels_in_flight = {self._limit}",
                hint="make them smaller, or raise max_pixels_in_flight",
            )
        ticket = object()

        def is_next() -> bool:
            return self._waiting[0] is ticket and self.num_held + num_pixels <= self._limit

        with self._changed:
            self._waiting.append(ticket)
            try:
                if not self._changed.wait_for(is_next, self._timeout_s):
                    raise QueueFullError(
                        "too many pixels are being decoded",
                        retry_after_s=_RETRY_AFTER_S,
                        got=f"{num_pixels} pixels beside {self.num_held} of other requests",
                        expected=f"max_pixels_in_flight = {self._limit} together, "
                        f"within image_wait_timeout_s = {self._timeout_s:g} s",
                    )
                self.num_held += num_pixels
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self.num_held -= num_pixels
                self._changed.notify_all()

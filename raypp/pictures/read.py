"""From whatever a user hands in as a picture to pixels."""

from __future__ import annotations

import base64
import binascii
import os
from pathlib import Path
from typing import Any

from PIL import Image

from raypp.config.sections import ImagesSection
from raypp.errors import RequestError
from raypp.pictures.decode import check_size, decode_image, image_of_array, to_rgb
from raypp.pictures.fetch import Fetcher

_FORMS = "a PIL image, a path, the bytes of a file, or an array [height, width, 3] of uint8"


def read_image(source: Any, fetcher: Fetcher) -> Image.Image:
    """Return what a user of the Python doors gives as an image, RGB. A path is trusted: it is the user's own.

    Raises:
        RequestError: it is none, or cannot be read.
    """
    limits = fetcher.limits
    if isinstance(source, Image.Image):
        return _read_pil(source, limits)
    if isinstance(source, bytes | bytearray | memoryview):
        return decode_image(bytes(source), limits)
    if isinstance(source, str) and source.startswith(("data:", "http://", "https://")):
        return read_image_url(source, fetcher)
    if isinstance(source, str | os.PathLike):
        return decode_image(_read_file(Path(source), limits), limits)
    if hasattr(source, "__array__") or hasattr(source, "__array_interface__"):
        return image_of_array(source, limits)
    raise RequestError("not an image", got=type(source).__name__, expected=_FORMS)


def read_image_url(url: Any, fetcher: Fetcher) -> Image.Image:
    """Return the image at an address; `data:` holds it itself, others are fetched if the configuration allows that.

    Raises:
        RequestError: not allowed, or no image.
    """
    if not isinstance(url, str):
        raise RequestError("not an image's address", got=type(url).__name__, expected="a string")
    if url[:5].lower() == "data:":
        return decode_image(_data_of(url, fetcher.limits), fetcher.limits)
    return decode_image(fetcher.fetch(url), fetcher.limits)


def _read_pil(image: Image.Image, limits: ImagesSection) -> Image.Image:
    check_size(image, limits)
    if getattr(image, "n_frames", 1) > 1:
        raise RequestError(
            "an animated image",
            got=f"{image.format} of {getattr(image, 'n_frames', 1)} frames",
            expected="a still one",
            hint='a video is a list of frames: {"type": "video", "video": [...]}',
        )
    try:
        image.load()  # a file that was opened and not read yet
    except Exception as error:  # see decode_image
        raise RequestError("an image file is broken or truncated", got=f"{type(error).__name__}: {error}") from error
    return to_rgb(image)


def _read_file(path: Path, limits: ImagesSection) -> bytes:
    try:
        num_bytes = path.stat().st_size
        if num_bytes > limits.max_image_bytes:
            raise RequestError(
                "an image file is too large",
                got=f"{path}: {num_bytes} bytes",
                expected=f"at most max_image_bytes = {limits.max_image_bytes}",
            )
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise RequestError("an image file cannot be read", got=error, expected=_FORMS) from error


def _data_of(url: str, limits: ImagesSection) -> bytes:
    head, comma, text = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise RequestError(
            "an image in a data address must be in base64", got=repr(url[:60]), expected="data:image/png;base64,..."
        )
    if len(text) * 3 // 4 > limits.max_image_bytes + 2:
        raise RequestError(
            "an image file is too large",
            got=f"about {len(text) * 3 // 4} bytes",
            expected=f"at most max_image_bytes = {limits.max_image_bytes}",
        )
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError("an image's base64 is broken", got=error) from error

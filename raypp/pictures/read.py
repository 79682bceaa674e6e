"""From whatever a user hands in as an image to an opened image, whose pixels are decoded later."""

from __future__ import annotations

import base64
import binascii
import os
import stat
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from PIL import Image

from raypp.config.sections import ImagesSection
from raypp.errors import RequestError
from raypp.pictures.decode_picture import OpenedImage, check_bytes, open_array, open_file, open_pil
from raypp.pictures.fetch import Fetcher
from raypp.pictures.web_address import is_web_address

_FORMS = "a PIL image, a path, the bytes of a file, or an array [height, width, 3] of uint8"


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

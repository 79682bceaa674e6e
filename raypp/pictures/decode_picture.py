"""From the bytes of any file to pixels: every limit holds before memory is spent.

An image is opened first, which reads its head alone, and decoded when it is known to be allowed and to have room.
"""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError
from PIL.ExifTags import Base as ExifTag

from raypp.config.sections import ImagesSection
from raypp.errors import RequestError

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_STILL_OF_MANY = "MPO"  # what cameras write: a JPEG, and behind it smaller ones or its depth
_TRANSPARENT = ("RGBA", "LA", "PA", "La", "RGBa")
_CONVERTIBLE = ("RGB", "L", "1", "P", "CMYK", "YCbCr", "HSV", "RGBX")
_DEEP = ("I;16", "I;16B", "I;16L", "I;16N")  # grey of 16 bits
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""By Exif's orientation, what brings an image upright."""

_TO_THE_SIDE = [_TURNS[orientation] for orientation in (5, 6, 7, 8)]

_MAX_SCANNED_PIXELS = 1 << 32
"""Of a JPEG: its pixels times its scans, each of which goes through all of them. A few bytes make a scan."""

_MAX_READS = 500_000
"""Of a file. A GIF of the largest size takes a third of that; a second or two pass until it is used up."""

_MAX_PIXELS_IN_FULL = 4 << 20
"""A JPEG of more is decoded at a half, a quarter or an eighth of its size where that is still twice what is needed."""


_USERS_OBJECTS = threading.Lock()
"""Held while a PIL image of a user reads its file. It may be in several requests, of several engines even, and when two
threads read it at once, Pillow sees a broken file or wrong pixels."""


class _CountedFile(io.BytesIO):
    """A file in memory that may be read so often: Pillow goes through small parts one at a time, in Python."""

    num_reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self.num_reads += 1
        if self.num_reads > _MAX_READS:
            raise RequestError(
                "an image file is made of too many small parts",
                got=f"{len(self.getbuffer())} bytes, not read to their end in {_MAX_READS} pieces",
                expected="fewer and larger chunks, segments or blocks",
                hint="save it again, without metadata",
            )
        return super().read(size)


class OpenedImage:
    """An image of an allowed size that is not decoded yet."""

    def __init__(self, image: Image.Image, num_bytes: int, *, is_own: bool) -> None:
        """Take an image.

        Args:
            image: Opened.
            num_bytes: What the user handed in.
            is_own: Whether it was opened here, so that it may be decoded at a smaller size.
        """
        self._image: Image.Image | None = image
        self._is_own = is_own
        self.num_bytes = num_bytes
        self.size = image.size
        """Width and height as stored."""
        self.is_turned = False
        """Once it is decoded: whether upright its height is what is stored as its width."""

    @property
    def num_pixels(self) -> int:
        """Pixels to decode."""
        return self.size[0] * self.size[1]

    def decode(self, needed: tuple[int, int] | None = None) -> Image.Image:
        """Return it in RGB, upright as its camera was held; what is transparent becomes white, as on a page.

        Once: nothing of it is kept then.

        Args:
            needed: Width and height, as stored, that it will be resized to. A large JPEG may come smaller then, but
                still more than twice as large as that.

        Raises:
            RequestError: a broken file, or colours that cannot be converted.
        """
        image, self._image = self._image, None
        assert image is not None, "it was decoded already"
        with _readable():
            if self._is_own and needed is not None and self.num_pixels > _MAX_PIXELS_IN_FULL:
                image.draft(None, (2 * needed[0], 2 * needed[1]))
            with contextlib.nullcontext() if self._is_own else _USERS_OBJECTS:
                image.load()
                turn = _turn_of(image)
            self.is_turned = turn in _TO_THE_SIDE
            rgb = to_rgb(image)
            return rgb if turn is None else rgb.transpose(turn)


def open_file(data: bytes, limits: ImagesSection) -> OpenedImage:
    """Return the image in a file.

    Raises:
        RequestError: no image, one whose head is broken, an animated one, or too large.
    """
    check_bytes(len(data), limits)
    try:
        with _readable():
            image = Image.open(_CountedFile(data), formats=_FORMATS)
            check_size(*image.size, limits)
            _check_still(image)
            if image.format in ("JPEG", _STILL_OF_MANY):
                _check_scans(data, image)
            return OpenedImage(image, len(data), is_own=True)
    except UnidentifiedImageError as error:
        raise RequestError(
            "not an image, or its file is broken",
            got=f"{len(data)} bytes that begin with {data[:8]!r}",
            expected=f"a file in one of the formats {', '.join(_FORMATS)}",
        ) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:  # the latter if it is an error
        raise RequestError("an image has too many pixels", got=error, expected=_pixel_limit(limits)) from error


def open_pil(image: Image.Image, limits: ImagesSection) -> OpenedImage:
    """Return an image that the user opened.

    Raises:
        RequestError: an animated one, or too large.
    """
    check_size(*image.size, limits)
    with _readable(), _USERS_OBJECTS:
        _check_still(image)
    return OpenedImage(image, image.size[0] * image.size[1] * len(image.getbands()), is_own=False)


def open_array(array: Any, limits: ImagesSection) -> OpenedImage:
    """Return an array of pixels as an image. Shapes: [H, W], or [H, W, C] with C = 1, 3 or 4; uint8.

    Raises:
        RequestError: another shape or type, or too large.
    """
    pixels = np.asarray(array)
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] not in (1, 3, 4)):
        raise RequestError(
            "an array that is no image",
            got=f"{pixels.dtype} of shape {pixels.shape}",
            expected="uint8 of shape [height, width, 3]",
            hint="floats from 0 to 1 become pixels by (255 * x).astype(numpy.uint8)",
        )
    height, width = pixels.shape[:2]
    check_size(width, height, limits)
    image = Image.fromarray(pixels[:, :, 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels)
    return OpenedImage(image, pixels.nbytes, is_own=False)


def check_bytes(num_bytes: int, limits: ImagesSection, name: str = "") -> None:
    """Raise when a file is larger than it may be.

    Args:
        num_bytes: Its size.
        limits: What the configuration allows.
        name: Of the file, for the message.
    """
    if num_bytes > limits.max_image_bytes:
        raise RequestError(
            "an image file is too large",
            got=f"{name}: {num_bytes} bytes" if name else f"{num_bytes} bytes",
            expected=f"at most max_image_bytes = {limits.max_image_bytes}",
        )


def check_size(width: int, height: int, limits: ImagesSection) -> None:
    """Raise when an image has no pixels, or more than may be decoded."""
    if width < 1 or height < 1:
        raise RequestError("an image has no pixels", got=f"{width} x {height}", expected="at least 1 x 1")
    if width * height > limits.max_image_pixels:
        raise RequestError("an image has too many pixels", got=f"{width} x {height}", expected=_pixel_limit(limits))


def to_rgb(image: Image.Image) -> Image.Image:
    """Return a decoded image in RGB; what is transparent becomes white. 16 bits become 8, colour profiles are ignored.

    Raises:
        RequestError: its values say nothing about colours.
    """
    if image.mode in _DEEP:
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in _TRANSPARENT or "transparency" in image.info:
        colours = image.convert("LA") if image.mode == "La" else image
        colours = colours if colours.mode == "RGBA" else colours.convert("RGBA")
        page = Image.new("RGB", colours.size, "white")
        page.paste(colours, mask=colours.getchannel("A"))
        return page
    if image.mode not in _CONVERTIBLE:
        raise RequestError(
            "an image in colours that cannot be converted",
            got=f"mode {image.mode}",
            expected=f"{', '.join(_CONVERTIBLE)}, {_DEEP[0]}, or one with transparency",
            hint="an array of uint8 of shape [height, width, 3] is taken as well",
        )
    return image if image.mode == "RGB" else image.convert("RGB")


def _turn_of(image: Image.Image) -> Image.Transpose | None:
    """Return what brings a decoded image upright; Exif that cannot be read says nothing."""
    try:
        return _TURNS.get(image.getexif().get(ExifTag.Orientation, 1))
    except Exception:  # whatever Pillow stumbles over: it is not about the pixels
        return None


def _check_still(image: Image.Image) -> None:
    # Not n_frames: to count them, a file may have to be read to its end.
    if getattr(image, "is_animated", False) and image.format != _STILL_OF_MANY:
        raise RequestError(
            "an animated image",
            got=f"a {image.format} of several frames",
            expected="a still one",
            hint="each frame can be an image of its own; LLM.chat takes a list of frames as a video",
        )


def _check_scans(data: bytes, image: Image.Image) -> None:
    num_scans = data.count(b"\xff\xda")
    if num_scans * image.size[0] * image.size[1] > _MAX_SCANNED_PIXELS:
        raise RequestError(
            "a progressive JPEG takes too long to decode",
            got=f"{num_scans} scans of {image.size[0]} x {image.size[1]}",
            expected=f"at most {_MAX_SCANNED_PIXELS} pixels in all scans together",
            hint="save it again, not progressive",
        )


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    """Let what Pillow raises be the file's fault, but for what the caller tells apart."""
    try:
        yield
    except (RequestError, UnidentifiedImageError, Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise
    except Exception as error:  # Pillow's decoders raise whatever the file makes them stumble over
        raise RequestError(
            "an image file is broken or truncated",
            got=f"{type(error).__name__}: {error}",
            expected="a complete file",
        ) from error


def _pixel_limit(limits: ImagesSection) -> str:
    return f"at most max_image_pixels = {limits.max_image_pixels}"

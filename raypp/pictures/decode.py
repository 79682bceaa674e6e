"""From the bytes of a file to pixels, whoever sent them: every limit holds before memory is spent."""

from __future__ import annotations

import io
import warnings
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from raypp.config.sections import ImagesSection
from raypp.errors import RequestError

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_TRANSPARENT = ("RGBA", "LA", "PA", "La", "RGBa")
_OPAQUE = ("RGB", "L", "1")


def decode_image(data: bytes, limits: ImagesSection) -> Image.Image:
    """Return the image in a file, RGB, upright as its camera was held.

    Raises:
        RequestError: no image, a broken or an animated one, colours that are not RGB or grey, or too large.
    """
    if len(data) > limits.max_image_bytes:
        raise RequestError(
            "an image file is too large",
            got=f"{len(data)} bytes",
            expected=f"at most max_image_bytes = {limits.max_image_bytes}",
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit below is ours
            image = Image.open(io.BytesIO(data), formats=_FORMATS)
            check_size(image, limits)
            if getattr(image, "n_frames", 1) > 1:
                raise RequestError(
                    "an animated image",
                    got=f"{image.format} of {getattr(image, 'n_frames', 1)} frames",
                    expected="a still one",
                    hint='a video is a list of frames: {"type": "video", "video": [...]}',
                )
            image.load()
            return to_rgb(ImageOps.exif_transpose(image))
    except UnidentifiedImageError as error:
        raise RequestError(
            "this is no image, or its file is broken from the start",
            got=f"{len(data)} bytes that begin with {data[:8]!r}",
            expected=f"a file in one of the formats {', '.join(_FORMATS)}",
        ) from error
    except Image.DecompressionBombError as error:
        raise RequestError("an image has too many pixels", got=error, expected=_pixel_limit(limits)) from error
    except RequestError:
        raise
    except Exception as error:  # Pillow's decoders raise whatever the file makes them stumble over
        raise RequestError(
            "an image file is broken or truncated",
            got=f"{type(error).__name__}: {error}",
            expected="a complete file",
        ) from error


def image_of_array(array: Any, limits: ImagesSection) -> Image.Image:
    """Return an array of pixels as an RGB image. Shapes: [H, W], or [H, W, C] with C = 1, 3 or 4; uint8.

    Raises:
        RequestError: another shape or type.
    """
    pixels = np.asarray(array)
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] not in (1, 3, 4)):
        raise RequestError(
            "an array that is no image",
            got=f"{pixels.dtype} of shape {pixels.shape}",
            expected="uint8 of shape [height, width, 3]",
            hint="floats from 0 to 1 become pixels by (255 * x).astype(numpy.uint8)",
        )
    if 0 in pixels.shape:
        raise RequestError("a picture has no pixels", got=f"an array of shape {pixels.shape}")
    image = Image.fromarray(pixels[:, :, 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels)
    check_size(image, limits)
    return to_rgb(image)


def check_size(image: Image.Image, limits: ImagesSection) -> None:
    """Raise when an image has no pixels, or more than may be decoded."""
    width, height = image.size
    if width < 1 or height < 1:
        raise RequestError("a picture has no pixels", got=f"{width} x {height}", expected="at least 1 x 1")
    if width * height > limits.max_image_pixels:
        raise RequestError("an image has too many pixels", got=f"{width} x {height}", expected=_pixel_limit(limits))


def to_rgb(image: Image.Image) -> Image.Image:
    """Return the image in RGB; what is transparent becomes white, as on a page.

    Raises:
        RequestError: its colours are neither RGB nor grey.
    """
    if image.mode in _TRANSPARENT or "transparency" in image.info:
        colours = image.convert("RGBA")
        page = Image.new("RGBA", colours.size, (255, 255, 255, 255))
        return Image.alpha_composite(page, colours).convert("RGB")
    if image.mode not in (*_OPAQUE, "P"):
        raise RequestError(
            "an image in colours that the model does not see",
            got=f"mode {image.mode}",
            expected="RGB or grey, of 8 bits each",
            hint='Pillow converts it: image.convert("RGB")',
        )
    return image.convert("RGB")


def _pixel_limit(limits: ImagesSection) -> str:
    return f"at most max_image_pixels = {limits.max_image_pixels}"

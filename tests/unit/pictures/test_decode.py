"""Odd image files: all colours that mean something are taken, and no file takes long or much memory for its size."""

from __future__ import annotations

import io
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from PIL import Image

from raypp.config.sections import ImagesSection
from raypp.errors import RequestError
from raypp.pictures.decode_picture import OpenedImage, open_array, open_file, open_pil

LIMITS = ImagesSection()
PIXELS = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)
IMAGE = Image.fromarray(PIXELS)
GREY = PIXELS[:, :, 0]
HALF_CLEAR = Image.merge("RGBA", [*IMAGE.split(), Image.new("L", (60, 40), 128)])


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def decoded(image: Image.Image, kind: str, **options: Any) -> np.ndarray[Any, Any]:
    """Return the pixels of a file."""
    found = open_file(file_of(image, kind, **options), LIMITS).decode()
    assert found.mode == "RGB"
    return np.asarray(found).astype(int)


def test_sixteen_bits_become_eight() -> None:
    deep = Image.fromarray(GREY.astype(np.uint16) * 256 + 17)
    assert deep.mode == "I;16"
    np.testing.assert_array_equal(decoded(deep, "PNG"), np.repeat(GREY[:, :, None], 3, axis=2))
    np.testing.assert_array_equal(np.asarray(open_pil(deep, LIMITS).decode())[:, :, 2], GREY)


def test_colours_of_print_and_video_are_converted() -> None:
    plain = Image.new("RGB", (60, 40), (200, 30, 30))
    assert np.abs(decoded(plain.convert("CMYK"), "JPEG") - (200, 30, 30)).max() <= 4
    for mode in ("CMYK", "YCbCr", "HSV", "RGBX"):
        assert np.abs(np.asarray(open_pil(plain.convert(mode), LIMITS).decode()).astype(int) - (200, 30, 30)).max() <= 4


def test_what_is_transparent_is_white_however_it_is_said() -> None:
    over_white = (PIXELS.astype(int) + 255) / 2
    assert np.abs(decoded(HALF_CLEAR, "PNG") - over_white).max() <= 1
    grey = np.asarray(IMAGE.convert("L")).astype(int)
    assert np.abs(decoded(HALF_CLEAR.convert("LA"), "PNG")[:, :, 0] - (grey + 255) / 2).max() <= 1
    assert (decoded(Image.new("RGB", (60, 40), (9, 9, 9)), "PNG", transparency=(9, 9, 9)) == 255).all()
    assert (decoded(Image.new("L", (60, 40), 9), "PNG", transparency=9) == 255).all()
    every = Image.new("P", (60, 40), 3)
    every.putpalette([10, 20, 30] * 256)
    for kind, clear in (("PNG", bytes(256)), ("PNG", 3), ("GIF", 3)):
        assert (decoded(every, kind, transparency=clear) == 255).all()
    for mode in ("PA", "La", "RGBa"):
        assert open_pil(Image.new(mode, (4, 4)), LIMITS).decode().getpixel((0, 0)) == (255, 255, 255), mode


@pytest.mark.parametrize("mode", ["I", "F", "LAB"])
def test_numbers_that_are_no_colours_are_refused(mode: str) -> None:
    with pytest.raises(RequestError, match=f"cannot be converted.*mode {mode}"):
        open_pil(Image.new(mode, (4, 4)), LIMITS).decode()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_turned_image_is_upright_as_a_file_and_as_an_object(kind: str) -> None:
    """As transformers' `load_image` has it."""
    exif = Image.Exif()
    exif[0x0112] = 6
    data = file_of(IMAGE, kind, exif=exif)
    for opened in (open_file(data, LIMITS), open_pil(Image.open(io.BytesIO(data)), LIMITS)):
        assert opened.size == (60, 40)
        assert opened.decode().size == (40, 60)
        assert opened.is_turned


def test_one_object_in_several_threads_is_read_once() -> None:
    data = file_of(Image.fromarray(np.random.default_rng(0).integers(0, 256, (800, 1000, 3), np.uint8)), "JPEG")
    expected = np.asarray(open_file(data, LIMITS).decode())
    with ThreadPoolExecutor(8) as threads:
        for _ in range(5):
            opened = [open_pil(image, LIMITS) for image in [Image.open(io.BytesIO(data))] * 8]
            for image in threads.map(OpenedImage.decode, opened):
                np.testing.assert_array_equal(np.asarray(image), expected)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_exif_that_cannot_be_read_says_nothing() -> None:
    bad = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x02\0\0\0\x04abcd"
    assert open_file(file_of(IMAGE, "JPEG", exif=bad), LIMITS).decode().size == (60, 40)


def test_a_cameras_file_of_several_images_is_its_first() -> None:
    data = file_of(IMAGE, "MPO", save_all=True, append_images=[Image.new("RGB", (30, 20))])
    assert Image.open(io.BytesIO(data)).format == "MPO"
    assert open_file(data, LIMITS).decode().size == (60, 40)


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_animated_images_are_refused(kind: str) -> None:
    data = file_of(IMAGE, kind, save_all=True, append_images=[Image.new("RGB", (60, 40), "red")])
    for image in (data, Image.open(io.BytesIO(data))):
        with pytest.raises(RequestError, match=f"animated.*a {kind} of several frames.*an image of its own"):
            open_pil(image, LIMITS) if isinstance(image, Image.Image) else open_file(image, LIMITS)


def test_frames_are_not_counted_to_know_that_there_are_several() -> None:
    one = file_of(Image.new("P", (1, 1)), "GIF")
    start = one.index(b"\x2c")
    with pytest.raises(RequestError, match="animated"):
        open_file(one[:start] + one[start:-1] * 500_000 + b"\x3b", LIMITS)


def test_a_jpeg_of_many_scans_is_refused_before_it_is_decoded() -> None:
    data = file_of(Image.new("RGB", (2048, 2048)), "JPEG", progressive=True)
    scan = data[data.rfind(b"\xff\xda") : -2]
    with pytest.raises(RequestError, match=r"too long to decode.*20\d\d scans of 2048 x 2048"):
        open_file(data[:-2] + scan * 2000 + data[-2:], LIMITS)


@pytest.mark.parametrize(
    "data",
    [
        file_of(IMAGE, "JPEG").replace(b"\xff\xd8", b"\xff\xd8" + b"\xff\xe2\0\x02" * 300_000, 1),
        file_of(Image.new("P", (1, 1)), "GIF")[:-1] + b"\0" * 600_000 + b"\x3b",
    ],
)
def test_a_file_of_very_many_parts_is_refused(data: bytes) -> None:
    with pytest.raises(RequestError, match="too many small parts"):
        open_file(data, LIMITS)


def test_the_size_is_known_and_checked_before_a_pixel_is_decoded() -> None:
    truncated = file_of(Image.new("RGB", (3000, 2000)))[:100]
    assert open_file(truncated, LIMITS).num_pixels == 6_000_000
    with pytest.raises(RequestError, match="broken or truncated"):
        open_file(truncated, LIMITS).decode()
    with pytest.raises(RequestError, match=r"too many pixels.*3000 x 2000.*max_image_pixels = 5000000"):
        open_file(truncated, ImagesSection(max_image_pixels=5_000_000))
    with pytest.raises(RequestError, match=r"too many pixels.*1048576 x 1048576"):
        open_array(np.broadcast_to(np.uint8(0), (1 << 20, 1 << 20, 3)), LIMITS)


def test_a_large_jpeg_is_decoded_smaller_where_it_is_made_much_smaller() -> None:
    x, y = np.meshgrid(np.linspace(0, 255, 2400), np.linspace(0, 255, 2000))
    data = file_of(Image.fromarray(np.stack([x, y, 255 - x], -1).astype(np.uint8)), "JPEG", quality=95)

    def sized(opened: OpenedImage, needed: tuple[int, int] | None) -> tuple[tuple[int, int], np.ndarray[Any, Any]]:
        image = opened.decode(needed)
        return image.size, np.asarray(image.resize((48, 40), Image.Resampling.BOX)).astype(int)

    full_size, full = sized(open_file(data, LIMITS), None)
    small_size, small = sized(open_file(data, LIMITS), (480, 400))
    assert (full_size, small_size) == ((2400, 2000), (1200, 1000))
    assert np.abs(full - small).max() <= 3
    assert open_file(data, LIMITS).decode((1000, 800)).size == (2400, 2000)
    assert open_pil(Image.open(io.BytesIO(data)), LIMITS).decode((480, 400)).size == (2400, 2000)  # the user's object


def test_heads_that_claim_nonsense() -> None:
    for height in (0, -(1 << 31), 1 << 30):
        head = struct.pack("<IiiHHIIiiII", 40, 5, height, 1, 24, 0, 0, 0, 0, 0, 0)
        with pytest.raises(RequestError):
            open_file(b"BM" + struct.pack("<IHHI", 100, 0, 0, 54) + head + bytes(50), LIMITS).decode()

"""Whatever is handed in as a picture is either read or refused with a reason, before memory is spent on it."""

from __future__ import annotations

import base64
import io
import struct
import weakref
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from vision_configs import vision_config

from raypp.config.sections import ImagesSection
from raypp.errors import RequestError
from raypp.pictures.content import ImageContent, VideoContent, has_pictures, take_pictures
from raypp.pictures.decode_picture import OpenedImage, to_rgb
from raypp.pictures.fetch import Fetcher
from raypp.pictures.reader import PictureMarks, PictureReader, ReadPicture, open_image, open_image_url

FETCHER = Fetcher(ImagesSection())
PIXELS = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)


def read_image(source: Any, fetcher: Fetcher) -> Image.Image:
    return open_image(source, fetcher).decode()


def _file(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def _png(width: int, height: int) -> bytes:
    """Return a tiny PNG file that claims a size."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def _data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


IMAGE = Image.fromarray(PIXELS)
GIF = _file(IMAGE, "GIF", save_all=True, append_images=[Image.new("RGB", (60, 40), "red")], duration=100)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "WEBP"])
def test_every_form_gives_the_same_pixels(kind: str, tmp_path: Path) -> None:
    data = _file(IMAGE, kind, **({"lossless": True} if kind == "WEBP" else {}))
    path = tmp_path / "picture"
    path.write_bytes(data)
    for source in (IMAGE, data, bytearray(data), path, str(path), PIXELS, _data_url(data)):
        image = read_image(source, FETCHER)
        assert image.mode == "RGB"
        np.testing.assert_array_equal(np.asarray(image), PIXELS)


def test_grey_paletted_transparent_and_turned_images() -> None:
    grey = Image.fromarray(PIXELS[:, :, 0])
    np.testing.assert_array_equal(np.asarray(read_image(grey, FETCHER))[:, :, 1], PIXELS[:, :, 0])
    np.testing.assert_array_equal(np.asarray(read_image(PIXELS[:, :, :1], FETCHER))[:, :, 2], PIXELS[:, :, 0])
    assert read_image(_file(IMAGE.convert("P")), FETCHER).mode == "RGB"
    assert to_rgb(Image.new("RGBA", (2, 2), (200, 0, 0, 0))).getpixel((0, 0)) == (255, 255, 255)
    turned = Image.Exif()
    turned[0x0112] = 6
    assert read_image(_file(IMAGE, "JPEG", exif=turned), FETCHER).size == (40, 60)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (b"", "not an image"),
        (b"no image at all", "not an image"),
        (_file(IMAGE)[:400], "broken or truncated"),
        (_file(IMAGE, "JPEG")[:-300], "broken or truncated"),
        (b"\x89PNG\r\n\x1a\n" + bytes(50), "broken"),
        (_png(100_000, 100_000), "too many pixels"),
        (_png(20_000, 20_000), "too many pixels"),
        (_png(0, 1), "broken"),
        (np.zeros((0, 1, 3), np.uint8), "no pixels"),
        (np.zeros((1, 0, 3), np.uint8), "no pixels"),
        (np.zeros((4, 4, 3)), "no image"),
        (np.zeros((4, 4, 2), np.uint8), "no image"),
        (GIF, "animated"),
        (Image.open(io.BytesIO(GIF)), "animated"),
        (Image.new("F", (4, 4)), "colours"),
        ("/no/such/file.png", "cannot be read"),
        ("data:image/png,abc", "base64"),
        ("data:image/png;base64,%%%", "base64"),
        ("data:image/png;base64,A", "base64"),
        ("data:image/png;base64,\u00e4", "base64"),
        ("data:image/png;base64,\ud800", "base64"),
        ("data:image/svg+xml;utf8,<svg/>", "base64"),
        ("data:image/svg+xml;base64,PHN2Zy8+", "not an image"),
        ("data:image/png;base64,", "not an image.*0 bytes"),
        ("/dev/null", "which is no file"),
        ("/", "which is no file"),
        (17, "not an image"),
    ],
)
def test_what_is_refused(source: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        read_image(source, FETCHER)


def test_base64_is_read_as_browsers_do() -> None:
    plain = base64.b64encode(_file(IMAGE)).decode()
    percents = plain.replace("+", "%2B").replace("/", "%2F").replace("=", "%3d")
    for text in (plain, plain.rstrip("="), f" {plain[:40]}\r\n {plain[40:]} ", percents):
        for head in (
            "data:image/png;base64,",
            "DATA:;BASE64,",
            "data:image/png;charset=utf-8; base64,",
            " data:;base64,",
        ):
            assert read_image(head + text, FETCHER).size == (60, 40)


def test_limits_of_bytes(tmp_path: Path) -> None:
    data = _file(IMAGE)
    path = tmp_path / "picture.png"
    path.write_bytes(data)
    tight = Fetcher(ImagesSection(max_image_bytes=len(data) - 1))
    for source in (data, path, _data_url(data)):
        with pytest.raises(RequestError, match="too large"):
            read_image(source, tight)
    assert read_image(data, Fetcher(ImagesSection(max_image_bytes=len(data)))).size == (60, 40)


def test_addresses_of_strangers_name_no_files(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(_file(IMAGE))
    fetcher = Fetcher(ImagesSection(allow_image_urls=True))
    for url in (str(path), f"file://{path}", "ftp://example.com/a.png", "http:///a.png", "http://a b/", 3, None):
        with pytest.raises(RequestError, match="address"):
            open_image_url(url, fetcher)
    with pytest.raises(RequestError, match="not allowed"):
        open_image_url("https://example.com/a.png", FETCHER)


def _reader(max_model_len: int = 200, **limits: Any) -> PictureReader:
    return PictureReader(vision_config(), max_model_len, Fetcher(ImagesSection(**limits)))


def test_a_picture_that_needs_more_tokens_than_there_are() -> None:
    large = ImageContent(Image.new("RGB", (1000, 1000)), is_address=False)
    assert len(_reader(65).read([large])) == 1  # 64 tokens
    with pytest.raises(RequestError, match="more tokens than") as caught:
        _reader(64).read([large])
    assert "max_model_len = 64" in str(caught.value)
    with pytest.raises(RequestError, match="more tokens than"):
        _reader(100).read([large, large])


def test_too_many_pictures() -> None:
    small = ImageContent(Image.new("RGB", (32, 32)), is_address=False)
    with pytest.raises(RequestError, match="too many images"):
        _reader(max_images_per_prompt=2).read([small] * 3)
    with pytest.raises(RequestError, match="too many images"):
        _reader(max_images_per_prompt=2).read([VideoContent((IMAGE,) * 3, 1.0)])


def test_sizes_are_checked_before_anything_is_decoded() -> None:
    half = ImageContent(_png(1000, 1000), is_address=False)  # a head without pixels
    with pytest.raises(RequestError, match="more tokens than"):
        _reader(64).read([half])
    with pytest.raises(RequestError, match=r"2000000 pixels.*at most max_pixels_in_flight = 1999999"):
        _reader(max_pixels_in_flight=1_999_999).read([half, half])
    with pytest.raises(RequestError, match="broken or truncated"):
        _reader(max_pixels_in_flight=2_000_000).read([half, half])


def test_the_bytes_of_a_prompts_images_are_bounded_as_files_and_as_patches() -> None:
    padded = ImageContent(_file(IMAGE) + bytes(100_000), is_address=False)
    num_bytes = len(padded.source)
    assert _reader(max_prompt_image_bytes=num_bytes).read([padded])
    with pytest.raises(RequestError, match=rf"{2 * num_bytes} bytes as they are handed in.*image_bytes = {num_bytes}"):
        _reader(max_prompt_image_bytes=num_bytes).read([padded, padded])
    empty = ImageContent(_file(Image.new("RGB", (60, 40))), is_address=False)
    [picture] = _reader().read([empty])
    limit = picture.items[0].patches.nbytes
    assert _reader(max_prompt_image_bytes=limit).read([empty])
    with pytest.raises(RequestError, match=rf"{2 * limit} bytes as patches; expected.*= {limit}"):
        _reader(max_prompt_image_bytes=limit).read([empty, empty])


def test_no_more_than_a_few_frames_of_a_video_are_decoded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[weakref.ref[Image.Image]] = []
    most = 0
    decode = OpenedImage.decode

    def counted(opened: OpenedImage, needed: tuple[int, int] | None = None) -> Image.Image:
        nonlocal most
        image = decode(opened, needed)
        decoded.append(weakref.ref(image))
        most = max(most, sum(found() is not None for found in decoded))
        return image

    monkeypatch.setattr(OpenedImage, "decode", counted)
    frames = tuple(_file(Image.new("RGB", (60, 40), (number, 0, 0))) for number in range(8))
    _reader().read([VideoContent(frames, 1.0)])
    assert len(decoded) == 8
    assert most <= 3


def test_frames_of_a_video_are_turned_one_by_one() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    turned, upright = _file(IMAGE, exif=exif), _file(IMAGE.transpose(Image.Transpose.ROTATE_270))
    [video] = _reader().read([VideoContent((turned, upright), 1.0)])
    [again] = _reader().read([VideoContent((upright, upright), 1.0)])
    assert video.items[0].key == again.items[0].key
    with pytest.raises(RequestError, match="differ in size"):
        _reader().read([VideoContent((turned, _file(IMAGE)), 1.0)])


def test_frames_of_a_video_are_marked_with_their_times() -> None:
    reader, marks = _reader(), PictureMarks("<s>", "</s>", "<i>", "<v>")
    [video] = reader.read([VideoContent((Image.new("RGB", (32, 32)),) * 5, 2.0)])
    assert video.seconds == (0.25, 1.25, 2.0)
    assert reader.mark_pictures("a<s><v></s>b", [video], marks) == (
        "a<0.2 seconds><s><v></s><1.2 seconds><s><v></s><2.0 seconds><s><v></s>b"
    )
    assert reader.mark_pictures("<s><v></s>", [ReadPicture(())], marks) == "<s><v></s>"
    with pytest.raises(RequestError, match="number of video placeholders"):
        reader.mark_pictures("<v> and <v>", [video], marks)
    with pytest.raises(RequestError, match="differ in size"):
        reader.read([VideoContent((Image.new("RGB", (32, 32)), Image.new("RGB", (32, 33))), 2.0)])


def test_pictures_are_taken_out_of_messages_in_order() -> None:
    text = {"type": "text", "text": "a"}
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "image", "image": 1}, text]},
        {"role": "assistant", "content": None},
        {
            "role": "user",
            "content": [text, {"type": "image_url", "image_url": {"url": "u"}}, {"type": "video", "video": [2]}],
        },
    ]
    plain, found = take_pictures(messages)
    assert [part["type"] for part in plain[3]["content"]] == ["text", "image", "video"]
    assert plain[0] == messages[0]
    assert plain[1]["content"] == [{"type": "image"}, text]
    image, address, video = found
    assert isinstance(image, ImageContent)
    assert (image.source, image.is_address) == (1, False)
    assert isinstance(address, ImageContent)
    assert (address.source, address.is_address) == ("u", True)
    assert isinstance(video, VideoContent)
    assert (video.frames, video.fps) == ((2,), 2.0)
    assert has_pictures(messages)
    assert not has_pictures([{"role": "user", "content": "<|image_pad|>"}, {"role": "user", "content": [text]}])


@pytest.mark.parametrize(
    "part",
    [
        {"type": "audio"},
        {"type": "image"},
        {"type": "text"},
        "text",
        {"type": "video", "video": "a.mp4"},
        {"type": "video", "video": []},
        {"type": "video", "video": [1], "fps": 0},
        {"type": "video", "video": [1], "fps": 10**400},
        {"type": "video", "video": [1], "fps": 1e-300},
    ],
)
def test_parts_that_are_no_pictures(part: Any) -> None:
    with pytest.raises(RequestError):
        take_pictures([{"role": "user", "content": [part]}])


def test_a_start_alone_stands_for_an_image() -> None:
    """Gemma 3's; a prompt that has all marks keeps them."""
    reader, marks = _reader(), PictureMarks("<s>", "</s>", "<i>", "", "start")
    assert reader.mark_pictures("a<s>b", [ReadPicture(())], marks) == "a\n\n<s><i></s>\n\nb"
    assert reader.mark_pictures("a<s><i></s>b", [ReadPicture(())], marks) == "a<s><i></s>b"


def test_a_placeholder_alone_stands_for_an_image() -> None:
    """Gemma 4's."""
    reader, marks = _reader(), PictureMarks("<s>", "</s>", "<i>", "", "image")
    assert reader.mark_pictures("a<i><i>b", [ReadPicture(())] * 2, marks) == "a<s><i></s><s><i></s>b"
    assert reader.mark_pictures("a<s><i></s>b", [ReadPicture(())], marks) == "a<s><i></s>b"

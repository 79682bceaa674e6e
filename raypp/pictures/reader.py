"""The images of one model's requests: from what the user gave to items, and their marks in the prompt's text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from PIL import Image

from raypp.errors import RequestError
from raypp.models.vision_config import VisionConfig
from raypp.pictures.beside import PicturesBeside
from raypp.pictures.content import Content, ImageContent, check_number, sources_of
from raypp.pictures.decode_picture import OpenedImage
from raypp.pictures.fetch import Fetcher
from raypp.pictures.patches import fitted_size, image_item, num_tokens_of, video_items
from raypp.pictures.pixel_room import PixelRoom
from raypp.pictures.read import open_image, open_image_url
from raypp.prompt_items import EncoderItem


@dataclass(frozen=True)
class PictureMarks:
    """The model's own words for images, as text."""

    start: str  # before an image
    end: str  # behind it
    video: str  # stands for the tokens of a group of frames


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
        self.beside = PicturesBeside(fetcher)
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

    def mark_frames(self, text: str, pictures: Sequence[ReadPicture], marks: PictureMarks) -> str:
        """Return a rendered prompt in which each video's mark is one per group of frames, and when it is shown.

        A video that the template put between its marks loses these: each group has its own.

        Raises:
            RequestError: there are not as many marks of videos as videos.
        """
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
        bounds = config.image_pixels if num_frames is None else config.video_pixels
        num_counted = 1 if num_frames is None else max(num_frames, config.temporal_patch_size)
        return fitted_size(height, width, config.side_factor, bounds, num_counted)

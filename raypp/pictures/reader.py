"""The pictures of one model's requests: from what the user gave to items, and their marks in the prompt's text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from raypp.errors import RequestError
from raypp.models.vision_config import VisionConfig
from raypp.pictures.content import Content, ImageContent, VideoContent
from raypp.pictures.fetch import Fetcher
from raypp.pictures.patches import fitted_size, image_item, num_tokens_of, video_items
from raypp.pictures.read import read_image, read_image_url
from raypp.prompt_items import EncoderItem


@dataclass(frozen=True)
class PictureMarks:
    """The model's own words for pictures, as text."""

    start: str  # before a picture
    end: str  # behind it
    video: str  # stands for the tokens of a group of frames


@dataclass(frozen=True, eq=False)
class ReadPicture:
    """An image, or a video."""

    items: tuple[EncoderItem, ...]  # of a video one per group of frames
    seconds: tuple[float, ...] | None = None  # of a video, when each of its groups is shown


class PictureReader:
    """Reads pictures for one model. Holds no state of requests; may be used from several threads.

    Args:
        config: Of the model's vision tower.
        max_model_len: The most tokens of a request.
        fetcher: Fetches addresses; its limits hold for every picture.
    """

    def __init__(self, config: VisionConfig, max_model_len: int, fetcher: Fetcher) -> None:
        self.config = config
        self._max_model_len = max_model_len
        self._fetcher = fetcher

    def read(self, contents: Sequence[Content]) -> list[ReadPicture]:
        """Return what the encoder is given of a prompt's pictures, in order.

        Raises:
            RequestError: one cannot be read, is not allowed, or they are too many or too large.
        """
        num_images = sum(len(c.frames) if isinstance(c, VideoContent) else 1 for c in contents)
        limit = self._fetcher.limits.max_images_per_prompt
        if num_images > limit:
            raise RequestError(
                "a prompt with too many images",
                got=f"{num_images} images and frames",
                expected=f"at most max_images_per_prompt = {limit}",
            )
        room, pictures = self._max_model_len, []
        for content in contents:
            picture = self._image(content, room) if isinstance(content, ImageContent) else self._video(content, room)
            room -= sum(item.num_tokens for item in picture.items)
            pictures.append(picture)
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
                "the prompt has not as many marks as there are videos",
                got=f"{len(parts) - 1} marks, {len(videos)} videos",
                expected="one for each",
                hint="text must not hold the model's own marks for pictures",
            )
        marked = [parts[0]]
        for seconds, part in zip(videos, parts[1:], strict=True):
            marked += [f"<{second:.1f} seconds>{marks.start}{marks.video}{marks.end}" for second in seconds]
            marked.append(part)
        return "".join(marked)

    def _image(self, content: ImageContent, room: int) -> ReadPicture:
        read = read_image_url if content.is_address else read_image
        image = read(content.source, self._fetcher)
        size = self._fitted_size(image, 1, room)
        return ReadPicture((image_item(image, size, self.config),))

    def _video(self, content: VideoContent, room: int) -> ReadPicture:
        frames = [read_image(frame, self._fetcher) for frame in content.frames]
        sizes = {frame.size for frame in frames}
        if len(sizes) > 1:
            raise RequestError("the frames of a video differ in size", got=sorted(sizes), expected="one size")
        group = self.config.temporal_patch_size
        size = self._fitted_size(frames[0], max(len(frames), group), room)
        items = video_items(frames, size, self.config)
        times = [index / content.fps for index in range(len(frames))]
        times += times[-1:] * (-len(times) % group)
        middles = tuple((times[at] + times[at + group - 1]) / 2 for at in range(0, len(times), group))
        return ReadPicture(tuple(items), middles)

    def _fitted_size(self, image: Image.Image, num_frames: int, room: int) -> tuple[int, int]:
        """Return the size that it is resized to, once its tokens are known to have room: before any work is done."""
        config = self.config
        bounds = config.image_pixels if num_frames == 1 else config.video_pixels
        size = fitted_size(image.height, image.width, config.side_factor, bounds, num_frames)
        num_groups = -(-num_frames // config.temporal_patch_size)
        num_tokens = num_groups * num_tokens_of(size, config)
        if num_tokens >= room:
            raise RequestError(
                "a picture needs more tokens than the model has room for",
                got=f"{num_tokens} tokens for {image.width} x {image.height}"
                + (f" and {num_frames} frames" if num_frames > 1 else ""),
                expected=f"fewer than {room} of max_model_len = {self._max_model_len}",
                hint="make it smaller, or raise max_model_len",
            )
        return size


def sources_as_contents(images: Any) -> list[Content]:
    """Return one image, or a list of them, as the contents of a prompt."""
    listed = images if isinstance(images, list | tuple) else [images]
    return [ImageContent(image, is_address=False) for image in listed]

"""The images in a conversation: taken out of the messages, in order, and replaced by what a chat template looks for.

{"type": "image", "image": PIL image, path, bytes or array}
{"type": "image_url", "image_url": {"url": "data:..."}}
{"type": "video", "video": [frame, ...], "fps": 2.0}            each frame as an image
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from raypp.config.sections import ImagesSection
from raypp.errors import RequestError

DEFAULT_FPS = 2.0
"""Frames per second of a video that does not say: what Qwen's own tools sample."""

_MIN_FPS, _MAX_FPS = 0.001, 1000

_FORMS = '{"type": "text", ...}, {"type": "image", ...}, {"type": "image_url", ...} or {"type": "video", ...}'


@dataclass(frozen=True, eq=False)
class ImageContent:
    """An image, as the user gave it."""

    source: Any
    is_address: bool  # whether it came as an address, which strangers name


@dataclass(frozen=True, eq=False)
class VideoContent:
    """Frames of one size, as the user gave them."""

    frames: tuple[Any, ...]
    fps: float
    is_address: ClassVar[bool] = False


Content = ImageContent | VideoContent


def take_pictures(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[Content]]:
    """Return the messages without their images, and the images in order.

    Raises:
        RequestError: a part that is neither text nor an image.
    """
    found: list[Content] = []
    plain = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, Sequence) and not isinstance(content, str):
            content = [_plain_part(part, found) for part in content]
        plain.append({**message, "content": content} if "content" in message else dict(message))
    return plain, found


def has_pictures(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether any part of any message is more than text."""
    return any(
        isinstance(part, Mapping) and part.get("type") in ("image", "image_url", "video")
        for message in messages
        if isinstance(message, Mapping)
        and isinstance(content := message.get("content"), Sequence)
        and not isinstance(content, str)
        for part in content
    )


def sources_of(content: Content) -> tuple[Any, ...]:
    """Return the image, or the frames, as the user gave them."""
    return (content.source,) if isinstance(content, ImageContent) else content.frames


def check_number(contents: Sequence[Content], limits: ImagesSection) -> None:
    """Raise when a prompt has more images and frames than it may."""
    num_images = sum(len(sources_of(content)) for content in contents)
    if num_images > limits.max_images_per_prompt:
        raise RequestError(
            "a prompt with too many images",
            got=f"{num_images} images and frames",
            expected=f"at most max_images_per_prompt = {limits.max_images_per_prompt}",
        )


def sources_as_contents(images: Any) -> list[Content]:
    """Return one image, or a list of them, as the contents of a prompt."""
    listed = images if isinstance(images, list | tuple) else [images]
    return [ImageContent(image, is_address=False) for image in listed]


def with_files(messages: Sequence[Mapping[str, Any]], files: Mapping[str, bytes]) -> list[dict[str, Any]]:
    """Return messages that `take_pictures` takes, with files in the place of their addresses.

    Args:
        messages: Any.
        files: By their addresses.
    """
    return [
        {**message, "content": [_filled(part, files) for part in content]}
        if isinstance(content := message.get("content"), Sequence) and not isinstance(content, str)
        else dict(message)
        for message in messages
    ]


def _filled(part: Any, files: Mapping[str, bytes]) -> Any:
    found: list[Content] = []
    _plain_part(part, found)
    if not found or not any(isinstance(source, str) and source in files for source in sources_of(found[0])):
        return part
    filled = [files.get(source, source) if isinstance(source, str) else source for source in sources_of(found[0])]
    return {**part, "video": filled} if part["type"] == "video" else {"type": "image", "image": filled[0]}


def _plain_part(part: Any, found: list[Content]) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "image" and "image" in part:
        found.append(ImageContent(part["image"], is_address=False))
        return {"type": "image"}
    if kind == "image_url" and "image_url" in part:
        value = part["image_url"]
        found.append(ImageContent(value.get("url") if isinstance(value, Mapping) else value, is_address=True))
        return {"type": "image"}
    if kind == "video" and "video" in part:
        found.append(_video(part))
        return {"type": "video"}
    if kind == "text" and isinstance(part.get("text"), str):
        return part
    raise RequestError("a part of a message that is neither text nor an image", got=repr(part)[:80], expected=_FORMS)


def _video(part: Mapping[str, Any]) -> VideoContent:
    frames, fps = part["video"], part.get("fps", DEFAULT_FPS)
    if isinstance(frames, str | bytes) or not isinstance(frames, Sequence) or not frames:
        raise RequestError(
            "a video is a list of frames",
            got=repr(frames)[:80],
            expected="images, at least one",
            hint="decode it first",
        )
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not _MIN_FPS <= fps <= _MAX_FPS:
        raise RequestError(
            "fps of a video is no number of frames per second",
            got=repr(fps)[:80],
            expected=f"from {_MIN_FPS} to {_MAX_FPS}",
        )
    return VideoContent(tuple(frames), float(fps))

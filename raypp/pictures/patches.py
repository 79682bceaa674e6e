"""From pixels to what the encoder takes: an image is resized so that whole patches fill it, and cut into them.

Tested against transformers' `Qwen2VLImageProcessorPil` and `Gemma3ImageProcessorPil`, which do the same for tensors of
floats. Here pixels stay what they are, 8 bits each: an eighth of the bytes to hash and to send, and the encoder scales
them in one operation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from raypp.errors import RequestError
from raypp.messages import Int32s
from raypp.models.vision_config import PixelBounds, VisionConfig
from raypp.prompt_items import EncoderItem, PromptItems

_MAX_ASPECT_RATIO = 200


def fitted_size(height: int, width: int, factor: int, bounds: PixelBounds, num_frames: int = 1) -> tuple[int, int]:
    """Return the height and width that an image is resized to: about the same, whole patches, within the bounds.

    The rule is Qwen's `smart_resize` (qwen-vl-utils 0.0.14; transformers 5.17, `models/qwen2_vl`), and for several
    frames that of `models/qwen3_vl/video_processing_qwen3_vl.py`.

    Args:
        height: Pixels.
        width: Pixels.
        factor: What both become multiples of.
        bounds: Of the pixels of all frames together.
        num_frames: Frames of a video, all of one size.

    Raises:
        RequestError: it has no pixels, or is 200 times as long as wide.
    """
    if num_frames > 1 and 0 < min(height, width) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    _check_shape(height, width)
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    num_counted = num_frames if num_frames == 1 else round(num_frames / 2) * 2
    if num_counted * rows * columns > bounds.max_pixels:
        shrink = math.sqrt(num_frames * height * width / bounds.max_pixels)
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        columns = max(factor, math.floor(width / shrink / factor) * factor)
    elif num_counted * rows * columns < bounds.min_pixels:
        stretch = math.sqrt(bounds.min_pixels / (num_frames * height * width))
        rows = math.ceil(height * stretch / factor) * factor
        columns = math.ceil(width * stretch / factor) * factor
    return rows, columns


def filled_size(height: int, width: int, factor: int, max_pixels: int) -> tuple[int, int]:
    """Return the height and width that an image is resized to: about its shape, whole patches, as large as may be.

    The rule is Gemma 4's (transformers 5.17, `models/gemma4/image_processing_pil_gemma4.py`). Arguments and errors are
    those of `fitted_size`.
    """
    _check_shape(height, width)
    stretch = math.sqrt(max_pixels / (height * width))
    rows, columns = (math.floor(side * stretch / factor) for side in (height, width))
    most = max_pixels // factor**2
    if not rows:
        rows, columns = 1, min(width // height, most)
    elif not columns:
        rows, columns = min(height // width, most), 1
    return rows * factor, columns * factor


def _check_shape(height: int, width: int) -> None:
    if height < 1 or width < 1:
        raise RequestError("an image has no pixels", got=f"{width} x {height}", expected="at least 1 x 1")
    if max(height, width) / min(height, width) > _MAX_ASPECT_RATIO:
        raise RequestError(
            "the aspect ratio of an image is too large",
            got=f"{width} x {height}",
            expected=f"sides that differ by a factor of at most {_MAX_ASPECT_RATIO}",
        )


def num_tokens_of(size: tuple[int, int], config: VisionConfig) -> int:
    """Return the tokens of an image of that fitted size."""
    return size[0] * size[1] // config.side_factor**2


def image_item(image: Image.Image, size: tuple[int, int], config: VisionConfig) -> EncoderItem:
    """Return the item of an RGB image. Shapes: size as `fitted_size` returns it."""
    pixels = _resized(image, size, config)
    return _item([pixels] * config.temporal_patch_size, config)


def video_items(frames: Iterable[Image.Image], size: tuple[int, int], config: VisionConfig) -> list[EncoderItem]:
    """Return the items of a video, one per group of frames that make a patch; the last frame fills the last group.

    Frames are taken one at a time, so that no more than one of them need be there in its own size.
    """
    pixels = [_resized(frame, size, config) for frame in frames]
    group = config.temporal_patch_size
    pixels += pixels[-1:] * (-len(pixels) % group)
    return [_item(pixels[start : start + group], config) for start in range(0, len(pixels), group)]


def _resized(image: Image.Image, size: tuple[int, int], config: VisionConfig) -> NDArray[np.uint8]:
    height, width = size
    if image.size != (width, height):
        resampling = Image.Resampling.BICUBIC if config.image_side is None else Image.Resampling.BILINEAR
        image = image.resize((width, height), resampling)
    return np.asarray(image)


def _item(frames: Sequence[NDArray[np.uint8]], config: VisionConfig) -> EncoderItem:
    """Return the item of the frames of one group, [H, W, C] each: patches in the order in which they are merged."""
    patch, merge = config.patch_size, config.spatial_merge_size
    stacked = np.stack(frames)
    time, height, width, channels = stacked.shape
    rows, columns = height // patch, width // patch
    cut = stacked.reshape(time, rows // merge, merge, patch, columns // merge, merge, patch, channels)
    # -> blocks, patches of a block, then a patch's channels, frames, rows and columns
    patches = np.ascontiguousarray(cut.transpose(1, 4, 2, 5, 7, 0, 3, 6)).reshape(rows * columns, config.patch_dim)
    return EncoderItem.of(patches, (1, rows, columns), rows * columns // config.patches_per_token)


def place_pictures(
    token_ids: Int32s | Sequence[int], items: Sequence[EncoderItem], config: VisionConfig
) -> tuple[Int32s, PromptItems]:
    """Return the prompt with as many placeholders as its images have tokens, and where they stand.

    Args:
        token_ids: The prompt [T], one placeholder per item.
        items: In the order of their placeholders.
        config: Of the model's vision tower.

    Raises:
        RequestError: there are more or fewer placeholders than items.
    """
    ids = np.asarray(token_ids, np.int32)
    places = np.flatnonzero(np.isin(ids, config.placeholder_ids))
    if len(places) != len(items):
        raise RequestError(
            "the number of image placeholders in the prompt differs from the number of images",
            got=f"{len(places)} placeholders, {len(items)} images",
            expected="one for each",
            hint="text must not contain the model's own image placeholders",
        )
    counts = np.ones(len(ids), np.int64)
    counts[places] = [item.num_tokens for item in items]
    starts = (np.cumsum(counts) - counts)[places].tolist()
    merge_size = config.spatial_merge_size if config.has_axes else None
    return np.repeat(ids, counts), PromptItems(tuple(items), tuple(starts), merge_size)

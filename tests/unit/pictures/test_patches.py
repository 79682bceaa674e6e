"""Pictures become the same patches as with transformers' own processor."""

from __future__ import annotations

import random

import numpy as np
import pytest
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    Gemma4ImageProcessorPil,
    get_aspect_ratio_preserving_size,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize
from vision_configs import vision_config

from raypp.errors import RequestError
from raypp.models.vision_config import PixelBounds
from raypp.pictures.patches import filled_size, fitted_size, image_item, num_tokens_of, video_items


def _noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


@pytest.mark.parametrize("patch_size", [8, 16])
@pytest.mark.parametrize("size", [(100, 80), (64, 64), (7, 9), (31, 300), (500, 20)])
def test_patches_equal_those_of_transformers(size: tuple[int, int], patch_size: int) -> None:
    config = vision_config(patch_size=patch_size)
    bounds = {"shortest_edge": config.image_pixels.min_pixels, "longest_edge": config.image_pixels.max_pixels}
    processor = Qwen2VLImageProcessorPil(
        patch_size=patch_size,
        temporal_patch_size=2,
        merge_size=2,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        size=bounds,
    )
    image = _noise(*size)
    expected = processor(images=[image], return_tensors="np")
    fitted = fitted_size(image.height, image.width, config.side_factor, config.image_pixels)
    item = image_item(image, fitted, config)
    assert list(item.grid_thw) == expected["image_grid_thw"][0].tolist()
    assert item.num_tokens == num_tokens_of(fitted, config) == len(item.patches) // 4
    np.testing.assert_array_equal((item.patches.astype(np.float32) / 255 - 0.5) / 0.5, expected["pixel_values"])


@pytest.mark.parametrize("size", [(100, 80), (64, 64), (7, 9), (31, 300), (500, 20)])
def test_squares_equal_those_of_transformers(size: tuple[int, int]) -> None:
    """Gemma 3's, whose patches are cut by the tower's convolution: here they are put together again."""
    side = 64
    config = vision_config(kind="gemma3", image_side=side, temporal_patch_size=1, spatial_merge_size=1)
    processor = Gemma3ImageProcessorPil(
        size={"height": side, "width": side}, image_mean=[0.5, 0.4, 0.6], image_std=[0.5, 0.3, 0.25]
    )
    image = _noise(*size)
    expected = processor(images=[image], return_tensors="np")["pixel_values"][0]
    item = image_item(image, (side, side), config)
    rows = side // config.patch_size
    patches = item.patches.reshape(rows, rows, 3, config.patch_size, config.patch_size)
    pixels = patches.transpose(2, 0, 3, 1, 4).reshape(3, side, side).astype(np.float32) / 255
    mean, deviation = (np.array(values, np.float32)[:, None, None] for values in ((0.5, 0.4, 0.6), (0.5, 0.3, 0.25)))
    np.testing.assert_allclose((pixels - mean) / deviation, expected, atol=1e-6)


@pytest.mark.parametrize("size", [(100, 80), (96, 96), (7, 9), (31, 300), (500, 20), (1, 190)])
def test_patches_that_fill_their_bounds_equal_those_of_transformers(size: tuple[int, int]) -> None:
    """Gemma 4's, which come square by square here, a patch's channels first."""
    config = vision_config(kind="gemma4", patch_size=4, temporal_patch_size=1, spatial_merge_size=3)
    image, side, merge = _noise(*size), config.patch_size, config.spatial_merge_size
    found = Gemma4ImageProcessorPil(patch_size=side, max_soft_tokens=70)(images=[image], return_tensors="np")
    fitted = filled_size(image.height, image.width, config.side_factor, 70 * config.side_factor**2)
    item = image_item(image, fitted, config)
    assert item.num_tokens == num_tokens_of(fitted, config) == found["num_soft_tokens_per_image"][0]
    rows, columns = (of // (side * merge) for of in fitted)
    patches = item.patches.reshape(rows, columns, merge, merge, 3, side, side)
    in_rows = patches.transpose(0, 2, 1, 3, 5, 6, 4).reshape(-1, config.patch_dim).astype(np.float32) / 255
    np.testing.assert_allclose(in_rows, found["pixel_values"][0][: len(in_rows)], atol=1e-6)


def test_filled_sizes_equal_those_of_transformers() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        height, width, most = rng.randint(1, 3000), rng.randint(1, 3000), rng.choice((70, 280, 1120))
        if max(height, width) / min(height, width) <= 200:
            expected = get_aspect_ratio_preserving_size(height, width, 16, most * 9, 3)
            assert filled_size(height, width, 48, most * 48 * 48) == expected


def test_sizes_equal_those_of_transformers() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        height, width = rng.randint(1, 3000), rng.randint(1, 3000)
        bounds = PixelBounds(min_pixels=rng.choice((1024, 65536)), max_pixels=rng.choice((70000, 1 << 24)))
        factor = rng.choice((16, 28, 32))
        if max(height, width) / min(height, width) <= 200:
            expected = smart_resize(height, width, factor, bounds.min_pixels, bounds.max_pixels)
            assert fitted_size(height, width, factor, bounds) == expected


def test_a_video_is_an_item_per_pair_of_frames() -> None:
    config = vision_config()
    frames = [_noise(64, 32, seed) for seed in range(3)]
    size = fitted_size(32, 64, config.side_factor, config.video_pixels, 4)
    items = video_items(frames, size, config)
    assert len(items) == 2  # the last frame stands twice
    assert {item.grid_thw for item in items} == {(1, size[0] // 16, size[1] // 16)}
    per_frame = [image_item(frame, size, config).patches.reshape(-1, 3, 2, 256) for frame in frames]
    for item, (first, second) in zip(items, ((0, 1), (2, 2)), strict=True):
        got = item.patches.reshape(-1, 3, 2, 256)
        np.testing.assert_array_equal(got[:, :, 0], per_frame[first][:, :, 0])
        np.testing.assert_array_equal(got[:, :, 1], per_frame[second][:, :, 0])


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (201, 1), (1, 400)])
def test_shapes_that_no_patches_fit(size: tuple[int, int]) -> None:
    with pytest.raises(RequestError, match=r"pixels|aspect ratio"):
        fitted_size(*size, 32, vision_config().image_pixels)

"""Pictures for benchmarks: noise of given sizes, as encoders take them, and prompts around them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from raypp.api.picture_prompts import EncodedPrompt
from raypp.models.vision_config import VisionConfig
from raypp.pictures.patches import fitted_size, place_pictures
from raypp.prompt_items import EncoderItem


def noise(config: VisionConfig, width: int, height: int, rng: np.random.Generator) -> EncoderItem:
    """Return a picture of that many pixels, resized as the model wants it."""
    tall, wide = fitted_size(height, width, config.side_factor, config.image_pixels)
    grid = (1, tall // config.patch_size, wide // config.patch_size)
    num_patches = grid[1] * grid[2]
    patches = rng.integers(0, 256, (num_patches, config.patch_dim), np.uint8)
    return EncoderItem.of(patches, grid, num_patches // config.patches_per_token)


def prompt_around(
    items: Sequence[EncoderItem], config: VisionConfig, num_text_tokens: int, vocab_size: int, rng: random.Random
) -> EncodedPrompt:
    """Return a prompt of text, then the pictures, then text."""
    marks = [config.vision_start_token_id, config.image_token_id, config.vision_end_token_id]
    words = sorted({*range(min(vocab_size, 4000))} - {*marks, config.video_token_id})
    text = rng.choices(words, k=num_text_tokens)
    half = num_text_tokens // 2
    token_ids, placed = place_pictures([*text[:half], *marks * len(items), *text[half:]], items, config)
    return EncodedPrompt(token_ids, placed)

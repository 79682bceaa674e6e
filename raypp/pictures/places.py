"""Where the tokens of images stand in a prompt.

The chat template leaves one placeholder token per image; the prompt needs one per token of the image.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raypp.errors import RequestError
from raypp.messages import Int32s
from raypp.models.vision_config import VisionConfig
from raypp.prompt_items import EncoderItem, PromptItems


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
    places = np.flatnonzero((ids == config.image_token_id) | (ids == config.video_token_id))
    if len(places) != len(items):
        raise RequestError(
            "the number of image placeholders in the prompt differs from the number of images",
            got=f"{len(places)} placeholders, {len(items)} images",
            expected="one for each",
            hint="text must not contain the model's own image placeholders, such as <|image_pad|>",
        )
    counts = np.ones(len(ids), np.int64)
    counts[places] = [item.num_tokens for item in items]
    starts = (np.cumsum(counts) - counts)[places].tolist()
    return np.repeat(ids, counts), PromptItems(tuple(items), tuple(starts), config.spatial_merge_size)

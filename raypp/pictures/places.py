"""Where the tokens of pictures stand in a prompt, and the rotary positions that follow from that.

The chat template leaves one placeholder token per picture; the prompt needs one per token of the picture.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from raypp.errors import RequestError
from raypp.models.vision_config import VisionConfig
from raypp.prompt_items import EncoderItem, PromptItems


def place_pictures(
    token_ids: Sequence[int], items: Sequence[EncoderItem], config: VisionConfig
) -> tuple[list[int], PromptItems]:
    """Return the prompt with as many placeholders as its pictures have tokens, and where they stand.

    Args:
        token_ids: The prompt, one placeholder per item.
        items: In the order of their placeholders.
        config: Of the model's vision tower.

    Raises:
        RequestError: there are more or fewer placeholders than items.
    """
    ids = np.asarray(token_ids, np.int64)
    places = np.flatnonzero((ids == config.image_token_id) | (ids == config.video_token_id))
    if len(places) != len(items):
        raise RequestError(
            "the prompt has not as many placeholders as there are pictures",
            got=f"{len(places)} placeholders, {len(items)} pictures",
            expected="one for each",
            hint="text must not hold the model's own marks for pictures, such as <|image_pad|>",
        )
    counts = np.ones(len(ids), np.int64)
    counts[places] = [item.num_tokens for item in items]
    starts = (np.cumsum(counts) - counts)[places].tolist()
    expanded: list[int] = np.repeat(ids, counts).tolist()
    positions = rope_positions(len(expanded), starts, items, config.spatial_merge_size)
    offset = int(positions.max()) + 1 - len(expanded)
    return expanded, PromptItems(tuple(items), tuple(starts), positions, offset)


def rope_positions(
    num_tokens: int, starts: Sequence[int], items: Sequence[EncoderItem], merge_size: int
) -> NDArray[np.int32]:
    """Return each token's position in time, height and width, int32 [num_tokens, 3] (M-RoPE, arXiv:2409.12191).

    Text goes on by one on all axes. A picture stays where it is in time and counts its rows and columns from there;
    what follows it begins behind its longer side.
    """
    positions = np.empty((num_tokens, 3), np.int32)
    token, next_position = 0, 0
    for start, item in zip(starts, items, strict=True):
        positions[token:start] = np.arange(next_position, next_position + start - token)[:, None]
        next_position += start - token
        time, height, width = item.grid_thw[0], item.grid_thw[1] // merge_size, item.grid_thw[2] // merge_size
        grid = np.stack(np.meshgrid(np.arange(time), np.arange(height), np.arange(width), indexing="ij"), axis=-1)
        positions[start : start + item.num_tokens] = grid.reshape(-1, 3) + next_position
        token = start + item.num_tokens
        next_position += max(height, width)
    positions[token:] = np.arange(next_position, next_position + num_tokens - token)[:, None]
    return positions

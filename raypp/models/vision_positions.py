"""Computes on the host where the patches of an image lie, which a vision tower needs to know.

Patches come in the order in which they are merged: block by block, and row by row within a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True, eq=False)
class GridPositions:
    """Of one image with P patches."""

    coordinates: torch.Tensor  # [P, 2] int64: row, column
    corner_indices: torch.Tensor  # [P, 4] int64: learned positions around each patch
    corner_weights: torch.Tensor  # [P, 4] float32: how near each of them is


@lru_cache(maxsize=256)
def grid_positions(height: int, width: int, merge_size: int, grid_side: int) -> GridPositions:
    """Return the positions of a grid of `height` x `width` patches; shapes repeat, so they are kept.

    Learned positions lie on a square grid whose corners are those of the image, and are interpolated bilinearly
    (Qwen3-VL; transformers 5.17, `vision_utils.py`).

    Args:
        height: Rows of patches, a multiple of `merge_size`.
        width: Columns, likewise.
        merge_size: Side of the blocks of patches that become one token.
        grid_side: Side of the learned grid.
    """
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    blocks = (height // merge_size, merge_size, width // merge_size, merge_size)
    rows, columns = (axis.reshape(blocks).transpose(1, 2).reshape(-1) for axis in (rows, columns))
    row_taps, row_weights = _taps(rows, height, grid_side)
    column_taps, column_weights = _taps(columns, width, grid_side)
    return GridPositions(
        coordinates=torch.stack((rows, columns), 1),
        corner_indices=(row_taps.unsqueeze(2) * grid_side + column_taps.unsqueeze(1)).view(-1, 4),
        corner_weights=(row_weights.unsqueeze(2) * column_weights.unsqueeze(1)).view(-1, 4),
    )


def _taps(indices: torch.Tensor, size: int, grid_side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two nearest places on the learned axis, and their weights, both [P, 2]."""
    places = indices.to(torch.float32) * (grid_side - 1) / max(size - 1, 1)
    below = places.floor()
    share = (places - below).unsqueeze(1)
    taps = torch.stack((below, (below + 1).clamp(max=grid_side - 1)), 1).to(torch.int64)
    return taps, torch.cat((1 - share, share), 1)

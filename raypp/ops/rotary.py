"""Rotary position embedding (RoPE, arXiv:2104.09864), in the layout whose pairs are the two halves of a head.

Angles are computed from the positions, once per step for all layers: there is no table to fill and none to clamp.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Rotation(NamedTuple):
    """Cosines and sines of a step's tokens. T tokens, D head_dim.

    Of `rotation`: cos [T, 1, 1, D / 2]; sin [T, 1, 2, D / 2], minus the sine for the first half of a head, the sine for
    the second. Kernels have shapes of their own, see `raypp.ops.cuda.heads`.
    """

    cos: torch.Tensor
    sin: torch.Tensor


def rotary_angles(positions: torch.Tensor, inverse_frequencies: torch.Tensor) -> torch.Tensor:
    """Return each token's angles, float32 [T, D / 2].

    Shapes: positions [T] int64 and inverse_frequencies [D / 2] float32; or, for positions along A axes, [T, A] and
    [A, D / 2], whose angles are added up.
    """
    angles = positions.to(torch.float32).unsqueeze(-1) * inverse_frequencies
    return angles if positions.ndim == 1 else angles.sum(1)


def rotation(
    positions: torch.Tensor, inverse_frequencies: torch.Tensor, dtype: torch.dtype, scale: float = 1.0
) -> Rotation:
    """Return the rotation of tokens at `positions` by `inverse_frequencies`, see `rotary_angles`.

    Angles, sines and cosines are float32 whatever `dtype` says of the result. These are multiplied by `scale`, as some
    stretched embeddings have it: queries and keys grow, and attention is sharper.
    """
    angles = rotary_angles(positions, inverse_frequencies)
    cos, sin = angles.cos(), angles.sin()
    if scale != 1.0:
        cos, sin = cos * scale, sin * scale
    signed_sin = torch.stack((-sin, sin), 1).unsqueeze(1)
    return Rotation(cos.to(dtype).view(-1, 1, 1, angles.shape[1]), signed_sin.to(dtype))


def apply_rotary(heads: torch.Tensor, by: Rotation) -> torch.Tensor:
    """Return the heads rotated. Shapes: heads [T, any number, D]; so queries and keys are one call."""
    halves = heads.view(heads.shape[0], heads.shape[1], 2, -1)
    # (a, b) -> (a cos - b sin, b cos + a sin), as one product and one fused addition over both halves.
    return torch.addcmul(halves * by.cos, halves.flip(-2), by.sin).view(heads.shape)

"""Scenes rendered on a GPU in one launch, where plain torch takes seven hundred. Twin: `tiny_pictures.render`."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 512
_FIFTH = 2 * math.pi / 5
_SIN_1, _COS_1 = tl.constexpr(math.sin(_FIFTH)), tl.constexpr(math.cos(_FIFTH))
_SIN_2, _COS_2 = tl.constexpr(math.sin(2 * _FIFTH)), tl.constexpr(math.cos(2 * _FIFTH))
_INNER_X, _INNER_Y = tl.constexpr(0.42 * math.cos(_FIFTH / 2)), tl.constexpr(0.42 * math.sin(_FIFTH / 2))
_EDGE = tl.constexpr(math.hypot(0.42 * math.cos(_FIFTH / 2) - 1, 0.42 * math.sin(_FIFTH / 2)))
_ROOT = tl.constexpr(math.sqrt(0.75))


def render(backgrounds: Tensor, things: Tensor, height: int, width: int, aspect: Tensor) -> Tensor:
    """Return scenes as pictures, uint8 [B, height, width, 3].

    Shapes: backgrounds [B, 3], things [B, N, 8], both float32; aspect [] float32, of the pictures before they are
    brought to this size.
    """
    pictures = torch.empty(len(things), height, width, 3, dtype=torch.uint8, device=things.device)
    grid = (len(things), triton.cdiv(height * width, _BLOCK))
    _render[grid](
        backgrounds.contiguous(),
        things.contiguous(),
        aspect,
        pictures,
        height,
        width,
        THINGS=things.shape[1],
        BLOCK=_BLOCK,
    )
    return pictures


@triton.jit
def _star(u, v, squared):
    """Return the distance from a star of five points: one edge of it, and its images."""
    along = tl.maximum(-v, tl.maximum(u * _SIN_1 - v * _COS_1, u * _SIN_2 - v * _COS_2))
    along = tl.maximum(along, tl.maximum(-u * _SIN_1 - v * _COS_1, -u * _SIN_2 - v * _COS_2))
    aside = tl.sqrt(tl.maximum(squared - along * along, 0.0))
    return ((along - 1) * _INNER_Y - aside * (_INNER_X - 1)) / _EDGE


@triton.jit
def _distance(outline, u, v):
    """Return how far points lie outside of a shape of radius 1; see `tiny_pictures._distances`."""
    a, b = tl.abs(u), tl.abs(v)
    squared = u * u + v * v
    radius = tl.sqrt(squared)
    disc = radius - 0.95
    distance = tl.where(outline == 0, disc, tl.maximum(a, b) - 0.85)
    distance = tl.where(outline == 2, tl.maximum(v - 0.5, a * _ROOT - 0.5 * v - 0.5), distance)
    distance = tl.where(outline == 3, _star(u, v, squared), distance)
    cross = tl.minimum(tl.maximum(a - 0.95, b - 0.32), tl.maximum(b - 0.95, a - 0.32))
    distance = tl.where(outline == 4, cross, distance)
    distance = tl.where(outline == 5, tl.abs(radius - 0.76) - 0.22, distance)
    distance = tl.where(outline == 6, (a / 0.68 + b - 1) * 0.56, distance)
    moon = tl.maximum(disc, 0.78 - tl.sqrt((u - 0.5) * (u - 0.5) + v * v))
    distance = tl.where(outline == 7, moon, distance)
    distance = tl.where(outline == 8, tl.maximum(a - 0.95, b - 0.28), distance)
    distance = tl.where(outline == 9, tl.maximum(disc, v), distance)
    return tl.where(outline == 10, tl.maximum(a, 0.5 * a + b * _ROOT) - 0.85, distance)


@triton.jit(do_not_specialize=["height", "width"])  # one kernel for all sizes
def _render(backgrounds, things, aspect, pictures, height, width, THINGS: tl.constexpr, BLOCK: tl.constexpr):
    picture = tl.program_id(0)
    pixel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = pixel < height * width
    ratio = tl.load(aspect)
    whole_width, whole_height = tl.maximum(ratio, 1.0), tl.maximum(1.0 / ratio, 1.0)  # the shorter side is 1
    pixels_per_unit = (height / whole_height + width / whole_width) / 2
    x = ((pixel % width).to(tl.float32) + 0.5) / width * whole_width
    y = ((pixel // width).to(tl.float32) + 0.5) / height * whole_height
    red = tl.zeros((BLOCK,), tl.float32) + tl.load(backgrounds + picture * 3)
    green = tl.zeros((BLOCK,), tl.float32) + tl.load(backgrounds + picture * 3 + 1)
    blue = tl.zeros((BLOCK,), tl.float32) + tl.load(backgrounds + picture * 3 + 2)
    for slot in range(THINGS):
        thing = things + (picture * THINGS + slot) * 8
        radius, angle = tl.load(thing + 2), tl.load(thing + 3)
        size = tl.maximum(radius, 1e-3)
        across = (x - tl.load(thing) * whole_width) / size
        down = (y - tl.load(thing + 1) * whole_height) / size
        cosine, sine = tl.cos(angle), tl.sin(angle)
        distance = _distance(
            tl.load(thing + 4).to(tl.int32), across * cosine + down * sine, down * cosine - across * sine
        )
        share = tl.minimum(tl.maximum(0.5 - distance * size * pixels_per_unit, 0.0), 1.0)
        share = tl.where(radius > 0, share, 0.0)
        red += share * (tl.load(thing + 5) - red)
        green += share * (tl.load(thing + 6) - green)
        blue += share * (tl.load(thing + 7) - blue)
    cell = pictures + (picture.to(tl.int64) * height * width + pixel) * 3
    tl.store(cell, (red + 0.5).to(tl.int32).to(tl.uint8), mask=inside)
    tl.store(cell + 1, (green + 0.5).to(tl.int32).to(tl.uint8), mask=inside)
    tl.store(cell + 2, (blue + 0.5).to(tl.int32).to(tl.uint8), mask=inside)

"""Reads a vision tower's sizes, and how images are brought to its patches, from the files beside its weights.

The first is in config.json's `vision_config`, the second in preprocessor_config.json and
video_preprocessor_config.json, with the values of the published Qwen3-VL where they are missing. Needs no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from raypp.models.config_fields import ConfigFields, read_json

TOWER_PREFIX = "model.visual."
TOWER_PREFIXES = (
    TOWER_PREFIX,
    *(before + part for before in ("", "model.") for part in ("vision_tower.", "multi_modal_projector.")),
)
"""The same, and those of towers that raypp does not have, whose language model it runs."""
"""Of the tower's tensors in a checkpoint."""

_HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True, kw_only=True)
class VisionFamily:
    """What config.json says nothing of, about the tower of a family of models."""

    vision_start_token_id: int  # those of the end, images and videos are near it
    has_deepstack: bool


@dataclass(frozen=True, kw_only=True)
class PixelBounds:
    """How large images are made, in pixels of all frames together."""

    min_pixels: int
    max_pixels: int


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """A vision tower's sizes, its tokens' ids, and how images are prepared for it."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    out_hidden_size: int  # the language model's
    grid_side: int  # learned positions lie on a grid of this side
    deepstack_layers: tuple[int, ...]  # after which rows are tapped
    rope_theta: float
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int  # before every image
    vision_end_token_id: int
    image_mean: tuple[float, ...]  # of pixels from 0 to 1, per channel
    image_std: tuple[float, ...]
    image_pixels: PixelBounds
    video_pixels: PixelBounds

    @property
    def head_dim(self) -> int:
        """D of a head."""
        return self.hidden_size // self.num_heads

    @property
    def patch_dim(self) -> int:
        """Numbers of a patch: channels, frames, rows, columns."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def patches_per_token(self) -> int:
        """Patches that are merged to one token."""
        return self.spatial_merge_size**2

    @property
    def side_factor(self) -> int:
        """What both sides of a prepared image are multiples of, pixels."""
        return self.patch_size * self.spatial_merge_size

    @property
    def tokens_per_max_image(self) -> int:
        """Tokens of the largest image."""
        return self.image_pixels.max_pixels // self.side_factor**2


def read_vision_config(path: Path, whole: ConfigFields, text_hidden_size: int, family: VisionFamily) -> VisionConfig:
    """Return the tower's configuration of a model directory.

    Args:
        path: The directory.
        whole: Its config.json.
        text_hidden_size: Of the language model, which the tower's rows must fit.
        family: The model's.

    Raises:
        ModelLoadError: a missing or wrong field.
    """
    fields = whole.section("vision_config")
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_heads")
    if hidden_size % num_heads or (hidden_size // num_heads) % 4:
        raise fields.error(
            "num_heads", num_heads, f"a divisor of hidden_size={hidden_size} that leaves a multiple of 4"
        )
    positions = fields.integer("num_position_embeddings", 2304)
    if math.isqrt(positions) ** 2 != positions:
        raise fields.error("num_position_embeddings", positions, "a square: positions lie on a grid")
    out_hidden_size = fields.integer("out_hidden_size")
    if out_hidden_size != text_hidden_size:
        raise fields.error("out_hidden_size", out_hidden_size, f"text_config.hidden_size={text_hidden_size}")
    if fields.get("hidden_act") not in (None, "gelu_pytorch_tanh"):
        raise fields.error("hidden_act", repr(fields.get("hidden_act")), "gelu_pytorch_tanh")
    images, videos = (
        _preprocessor(path, "preprocessor_config.json"),
        _preprocessor(path, "video_preprocessor_config.json"),
    )
    rope, start = fields.get("rope_parameters") or {}, family.vision_start_token_id
    return VisionConfig(
        depth=fields.integer("depth", 27),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=num_heads,
        in_channels=fields.integer("in_channels", 3),
        patch_size=fields.integer("patch_size", 16),
        temporal_patch_size=fields.integer("temporal_patch_size", 2),
        spatial_merge_size=fields.integer("spatial_merge_size", 2),
        out_hidden_size=out_hidden_size,
        grid_side=math.isqrt(positions),
        deepstack_layers=_deepstack_layers(fields) if family.has_deepstack else (),
        rope_theta=ConfigFields(whole.file, rope).number("rope_theta", 10000.0),
        image_token_id=whole.integer("image_token_id", start + 3),
        video_token_id=whole.integer("video_token_id", start + 4),
        vision_start_token_id=whole.integer("vision_start_token_id", start),
        vision_end_token_id=whole.integer("vision_end_token_id", start + 1),
        image_mean=images.numbers("image_mean", _HALF),
        image_std=images.numbers("image_std", _HALF),
        image_pixels=_pixel_bounds(images, PixelBounds(min_pixels=65536, max_pixels=16777216)),
        video_pixels=_pixel_bounds(videos, PixelBounds(min_pixels=4096, max_pixels=25165824)),
    )


def _deepstack_layers(fields: ConfigFields) -> tuple[int, ...]:
    layers, depth = fields.get("deepstack_visual_indexes"), fields.integer("depth", 27)
    if layers is None:
        layers = [8, 16, 24]
    if (
        not isinstance(layers, list)
        or not all(isinstance(index, int) and 0 <= index < depth for index in layers)
        or sorted(set(layers)) != layers
    ):
        raise fields.error("deepstack_visual_indexes", repr(layers), f"ascending layers below depth={depth}")
    return tuple(layers)


def _preprocessor(path: Path, name: str) -> ConfigFields:
    file = path / name
    return ConfigFields(file, read_json(file) if file.is_file() else {})


def _pixel_bounds(fields: ConfigFields, default: PixelBounds) -> PixelBounds:
    """Read `size` with its two edges, which mean areas here, or the older `min_pixels` and `max_pixels`."""
    size = fields.get("size")
    given = ConfigFields(fields.file, size if isinstance(size, dict) else {})
    bounds = PixelBounds(
        min_pixels=fields.integer("min_pixels", given.integer("shortest_edge", default.min_pixels)),
        max_pixels=fields.integer("max_pixels", given.integer("longest_edge", default.max_pixels)),
    )
    if bounds.min_pixels > bounds.max_pixels:
        raise fields.error("size", f"{bounds.min_pixels} to {bounds.max_pixels} pixels", "the smaller number first")
    return bounds

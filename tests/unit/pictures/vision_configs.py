"""A vision tower's configuration, small."""

from __future__ import annotations

from typing import Any

from raypp.models.vision_config import PixelBounds, VisionConfig


def vision_config(**changes: Any) -> VisionConfig:
    """Return a configuration with some fields replaced."""
    values: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "out_hidden_size": 32,
        "grid_side": 4,
        "deepstack_layers": (0,),
        "rope_theta": 10000.0,
        "image_token_id": 2,
        "video_token_id": 3,
        "vision_start_token_id": 4,
        "vision_end_token_id": 5,
        "image_mean": (0.5, 0.5, 0.5),
        "image_std": (0.5, 0.5, 0.5),
        "image_pixels": PixelBounds(min_pixels=1024, max_pixels=64 * 1024),
        "video_pixels": PixelBounds(min_pixels=4096, max_pixels=256 * 1024),
    }
    return VisionConfig(**values | changes)

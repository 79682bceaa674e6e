"""Reads a vision tower's sizes, and how images are brought to its patches, from the files beside its weights.

The first is in config.json's `vision_config`, the second in preprocessor_config.json (or processor_config.json) and
video_preprocessor_config.json, with the values of the published Qwen3-VL or Gemma where they are missing. Needs no
torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from raypp.models.config_fields import ConfigFields, read_json

TOWER_PREFIX = "model.visual."
AUDIO_PREFIXES = ("model.audio_tower.", "model.embed_audio.")
"""Of tensors of Gemma 4's encoder of sounds, which raypp does not have."""
TOWER_PREFIXES = (
    TOWER_PREFIX,
    *(
        before + part
        for before in ("", "model.")
        for part in ("vision_tower.", "multi_modal_projector.", "mm_projector.")
    ),
    *AUDIO_PREFIXES,
    *(f"model.{part}." for part in ("embed_vision", "vision_embedder")),
    *(f"{part}." for part in ("vision_encoder", "vision_language_adapter", "patch_merger", "pre_mm_projector_norm")),
)
"""Of tensors of towers in checkpoints: Qwen3-VL's, then those of Gemma's and of ones that raypp does not have; the last
in Mistral's own form."""

TowerKind = Literal["qwen3_vl", "gemma3", "gemma4"]

MarksInPrompts = Literal["all", "start", "image"]
"""Start, placeholder and end of an image; its start, or its placeholder, which stands for all three."""

_HALF = (0.5, 0.5, 0.5)
_BILINEAR, _BICUBIC = 2, 3  # as Pillow numbers them


@dataclass(frozen=True, kw_only=True)
class VisionFamily:
    """What config.json says nothing of, about the tower of a family of models."""

    kind: TowerKind = "qwen3_vl"
    vision_start_token_id: int  # those of the end, images and videos are near it, or at fixed distances
    has_deepstack: bool = False


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
    video_token_id: int | None  # None: the model takes no videos
    vision_start_token_id: int  # before every image
    vision_end_token_id: int
    image_mean: tuple[float, ...]  # of pixels from 0 to 1, per channel
    image_std: tuple[float, ...]
    image_pixels: PixelBounds
    video_pixels: PixelBounds
    kind: TowerKind = "qwen3_vl"
    image_side: int | None = None  # images are made squares of this side, pixels; None: they keep about their shape
    norm_eps: float = 1e-6
    sees_ahead: bool = False  # whether an image's tokens attend to all tokens of that image, those behind them, too
    is_standardized: bool = False  # whether pooled rows are brought to a mean and a deviation that the checkpoint has
    has_clipped_products: bool = False  # whether products have bounds of their inputs and outputs

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        """Tokens that stand for images and frames."""
        return (self.image_token_id,) if self.video_token_id is None else (self.image_token_id, self.video_token_id)

    @property
    def fills_bounds(self) -> bool:
        """Whether images are made as large as `image_pixels` allows; else they stay as they are within the bounds."""
        return self.kind == "gemma4"

    @property
    def marks_in_prompts(self) -> MarksInPrompts:
        """Which of an image's marks a rendered prompt has."""
        of_kinds: dict[TowerKind, MarksInPrompts] = {"qwen3_vl": "all", "gemma3": "start", "gemma4": "image"}
        return of_kinds[self.kind]

    @property
    def has_axes(self) -> bool:
        """Whether the rotary positions of an image's tokens lie along time, height and width."""
        return self.kind == "qwen3_vl"

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


def read_vision_config(
    path: Path, whole: ConfigFields, text_hidden_size: int, family: VisionFamily
) -> VisionConfig | None:
    """Return the tower's configuration of a model directory; None where a Gemma 4 has none.

    Args:
        path: The directory.
        whole: Its config.json.
        text_hidden_size: Of the language model, which the tower's rows must fit.
        family: The model's.

    Raises:
        ModelLoadError: a missing or wrong field.
    """
    if family.kind == "gemma3":
        return _read_gemma3(path, whole, text_hidden_size, family)
    if family.kind == "gemma4":
        has_tower = whole.get("vision_config") is not None
        return _read_gemma4(path, whole, text_hidden_size, family) if has_tower else None
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


def _read_gemma3(path: Path, whole: ConfigFields, text_hidden_size: int, family: VisionFamily) -> VisionConfig:
    """Return the configuration of Gemma 3's tower, SigLIP's, and of the pooling behind it."""
    fields, images = whole.section("vision_config"), _preprocessor(path, "preprocessor_config.json")
    hidden_size, num_heads = fields.integer("hidden_size", 768), fields.integer("num_attention_heads", 12)
    if hidden_size % num_heads:
        raise fields.error("num_attention_heads", num_heads, f"a divisor of hidden_size={hidden_size}")
    if fields.get("hidden_act") not in (None, "gelu_pytorch_tanh"):
        raise fields.error("hidden_act", repr(fields.get("hidden_act")), "gelu_pytorch_tanh")
    side, patch_size = fields.integer("image_size", 224), fields.integer("patch_size", 16)
    num_tokens, grid_side = whole.integer("mm_tokens_per_image", 256), side // patch_size
    token_side = math.isqrt(num_tokens)
    if token_side**2 != num_tokens or grid_side % token_side:
        raise whole.error("mm_tokens_per_image", num_tokens, f"a square whose side divides {grid_side} patches")
    size = images.get("size")
    if size is not None and size != {"height": side, "width": side}:
        raise images.error("size", size, f"height and width of image_size={side}")
    if images.get("resample") not in (None, _BILINEAR):
        raise images.error("resample", images.get("resample"), f"{_BILINEAR}, bilinear")
    if images.get("do_pan_and_scan"):
        raise images.error("do_pan_and_scan", True, "false: raypp gives the tower each image whole")
    start = family.vision_start_token_id
    return VisionConfig(
        kind="gemma3",
        depth=fields.integer("num_hidden_layers", 12),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", 3072),
        num_heads=num_heads,
        in_channels=fields.integer("num_channels", 3),
        patch_size=patch_size,
        temporal_patch_size=1,
        spatial_merge_size=grid_side // token_side,
        out_hidden_size=text_hidden_size,
        grid_side=grid_side,
        deepstack_layers=(),
        rope_theta=0.0,  # positions are learned
        image_token_id=whole.integer("image_token_index", start + 6145),
        video_token_id=None,
        vision_start_token_id=whole.integer("boi_token_index", start),
        vision_end_token_id=whole.integer("eoi_token_index", start + 1),
        image_mean=images.numbers("image_mean", _HALF),
        image_std=images.numbers("image_std", _HALF),
        image_pixels=PixelBounds(min_pixels=side**2, max_pixels=side**2),
        video_pixels=PixelBounds(min_pixels=side**2, max_pixels=side**2),
        image_side=side,
        norm_eps=fields.number("layer_norm_eps", 1e-6),
        sees_ahead=True,
    )


def _read_gemma4(path: Path, whole: ConfigFields, text_hidden_size: int, family: VisionFamily) -> VisionConfig:
    """Return the configuration of Gemma 4's tower, and of the pooling behind it."""
    fields, images = whole.section("vision_config"), _preprocessor(path, "preprocessor_config.json")
    hidden_size, num_heads = fields.integer("hidden_size", 768), fields.integer("num_attention_heads", 12)
    head_dim = fields.integer("head_dim", 64)
    if num_heads * head_dim != hidden_size or head_dim % 8:
        raise fields.error("head_dim", head_dim, f"a multiple of 8: hidden_size={hidden_size} / {num_heads} heads")
    if fields.integer("num_key_value_heads", num_heads) != num_heads:
        raise fields.error("num_key_value_heads", fields.get("num_key_value_heads"), f"{num_heads}, one per query head")
    if fields.get("hidden_activation") not in (None, "gelu_pytorch_tanh"):
        raise fields.error("hidden_activation", repr(fields.get("hidden_activation")), "gelu_pytorch_tanh")
    if fields.flag("attention_bias"):
        raise fields.error("attention_bias", True, "false: the tower's products have no bias")
    if images.get("resample") not in (None, _BICUBIC):
        raise images.error("resample", images.get("resample"), f"{_BICUBIC}, bicubic")
    if images.get("do_normalize"):
        raise images.error("do_normalize", True, "false: the tower itself scales pixels to -1 to 1")
    rope, start = ConfigFields(whole.file, fields.get("rope_parameters") or {}), family.vision_start_token_id
    patch_size, merge_size = fields.integer("patch_size", 16), fields.integer("pooling_kernel_size", 3)
    num_tokens = images.integer("max_soft_tokens", 280)
    most_pixels = num_tokens * (merge_size * patch_size) ** 2
    bounds = PixelBounds(min_pixels=most_pixels // 2, max_pixels=most_pixels)  # very long images are smaller
    return VisionConfig(
        kind="gemma4",
        depth=fields.integer("num_hidden_layers", 16),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", 3072),
        num_heads=num_heads,
        in_channels=3,
        patch_size=patch_size,
        temporal_patch_size=1,
        spatial_merge_size=merge_size,
        out_hidden_size=text_hidden_size,
        grid_side=fields.integer("position_embedding_size", 10240),
        deepstack_layers=(),
        rope_theta=rope.number("rope_theta", 100.0),
        image_token_id=whole.integer("image_token_id", start + 2881),
        video_token_id=None,
        vision_start_token_id=whole.integer("boi_token_id", start),
        vision_end_token_id=whole.integer("eoi_token_id", start + 2883),
        image_mean=_HALF,
        image_std=_HALF,
        image_pixels=bounds,
        video_pixels=bounds,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        sees_ahead=whole.section("text_config").get("use_bidirectional_attention") == "vision",
        is_standardized=fields.flag("standardize"),
        has_clipped_products=fields.flag("use_clipped_linears"),
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
    """Return what a file says; the one of all processors has a part for images."""
    file, of_all = path / name, path / "processor_config.json"
    if not file.is_file() and of_all.is_file() and not name.startswith("video"):
        return ConfigFields(of_all, read_json(of_all).get("image_processor") or {})
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

"""The vision tower of Qwen3-VL, and of Qwen3.5, 3.6 and 3.8, which has no deepstack.

    patches -> patch embedding + learned positions -> blocks -> merge 2 x 2 patches -> a row per token
                                                       |
                                                       +-- after some blocks: merge -> a deepstack row per token

Every image attends to itself alone. The same forward runs eagerly and inside of graphs; see `raypp.encoder.protocol`,
whose questions are answered here.

Their language models have rotary positions along three axes, see `raypp.models.families`.

Source: the published checkpoints' config.json and tensor names; transformers 5.17, `models/qwen3_vl`,
`models/qwen3_5`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray

from raypp.encoder.protocol import Per, TensorSpec
from raypp.models.tower_parts import Block, PatchEmbedding, SegmentTower, layer_norm, linear, merged_coordinates
from raypp.models.vision_config import TOWER_PREFIX, VisionConfig
from raypp.models.weights import WeightReader
from raypp.ops.vision import choose_rotate_qk, linear_gelu_tanh, segment_attention

_NORM_EPS = 1e-6


class Qwen3VLVisionTower(SegmentTower):
    """A `SupportsEncoderCudaGraph`. H hidden size of the tower, L taps."""

    position_inputs = (
        TensorSpec("coordinates", torch.int64, Per.PATCH, (2,)),
        TensorSpec("corner_indices", torch.int64, Per.PATCH, (4,)),
        TensorSpec("corner_weights", torch.float32, Per.PATCH, (4,)),
    )

    def _read(self, config: VisionConfig, whole: WeightReader) -> None:
        weights, hidden = whole.below(TOWER_PREFIX), config.hidden_size
        patch_shape = (config.in_channels, config.temporal_patch_size, config.patch_size, config.patch_size)
        embed = weights.below("patch_embed.proj.")
        weight, bias = embed.tensor("weight", hidden, *patch_shape), embed.tensor("bias", hidden)
        self._embed = PatchEmbedding(config, weight, bias)
        self._positions = weights.tensor("pos_embed.weight", config.grid_side**2, hidden)
        self._rotate_qk = choose_rotate_qk(whole.device, whole.dtype)
        self._blocks = [_block(config, weights.below(f"blocks.{index}.")) for index in range(config.depth)]
        self._merger = _Merger(config, weights.below("merger."), normalizes_merged=False)
        self._taps = {
            layer: _Merger(config, weights.below(f"deepstack_merger_list.{index}."), normalizes_merged=True)
            for index, layer in enumerate(config.deepstack_layers)
        }
        exponents = torch.arange(0, config.head_dim // 2, 2, dtype=torch.float32) / (config.head_dim // 2)
        self._inverse_frequencies = (1.0 / config.rope_theta**exponents).to(whole.device)

    def positions(self, height: int, width: int) -> Mapping[str, NDArray[Any]]:
        return grid_positions(height, width, self._config.spatial_merge_size, self._config.grid_side)

    def forward(self, inputs: Mapping[str, torch.Tensor], max_segment_len: int) -> torch.Tensor:
        hidden = self._embed(inputs["patches"])
        corners = F.embedding(inputs["corner_indices"], self._positions)
        hidden = hidden + (corners * inputs["corner_weights"].unsqueeze(2)).sum(1).to(hidden.dtype)
        angles = (inputs["coordinates"].to(torch.float32).unsqueeze(2) * self._inverse_frequencies).view(
            len(hidden), -1
        )
        cos, sin, starts = angles.cos(), angles.sin(), inputs["segment_starts"]

        def attend(qkv: torch.Tensor) -> torch.Tensor:
            q, k, v = self._rotate_qk(qkv, cos, sin).unbind(1)
            return segment_attention(q, k, v, starts, max_segment_len)

        tapped = []
        for index, block in enumerate(self._blocks):
            hidden = block(hidden, attend)
            if index in self._taps:
                tapped.append(self._taps[index](hidden))
        return torch.stack([self._merger(hidden), *tapped])


def _block(config: VisionConfig, weights: WeightReader) -> Block:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    return Block(
        num_heads=config.num_heads,
        norm1=layer_norm(weights.below("norm1."), hidden, _NORM_EPS),
        norm2=layer_norm(weights.below("norm2."), hidden, _NORM_EPS),
        qkv=linear([weights.below("attn.qkv.")], 3 * hidden, hidden),
        output=linear([weights.below("attn.proj.")], hidden, hidden),
        up=linear([weights.below("mlp.linear_fc1.")], intermediate, hidden, linear_gelu_tanh),
        down=linear([weights.below("mlp.linear_fc2.")], hidden, intermediate),
    )


class _Merger:
    """Blocks of patches to rows of the language model: norm, two products, GELU."""

    def __init__(self, config: VisionConfig, weights: WeightReader, *, normalizes_merged: bool) -> None:
        self._merged_size = config.hidden_size * config.patches_per_token
        self._normalizes_merged = normalizes_merged
        num_normalized = self._merged_size if normalizes_merged else config.hidden_size
        self._norm = layer_norm(weights.below("norm."), num_normalized, _NORM_EPS)
        self._up = linear([weights.below("linear_fc1.")], self._merged_size, self._merged_size)
        self._down = linear([weights.below("linear_fc2.")], config.out_hidden_size, self._merged_size)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [T, out_hidden_size]. Shapes: hidden [P, H]."""
        if self._normalizes_merged:
            merged = self._norm(hidden.view(-1, self._merged_size))
        else:
            merged = self._norm(hidden).view(-1, self._merged_size)
        return self._down(F.gelu(self._up(merged)))


@lru_cache(maxsize=256)
def grid_positions(height: int, width: int, merge_size: int, grid_side: int) -> dict[str, NDArray[Any]]:
    """Return where the patches of an image of `height` x `width` lie; shapes repeat, so results are kept.

    Patches come in the order in which they are merged. Learned positions lie on a square grid whose corners are those
    of the image, and are interpolated bilinearly (Qwen3-VL; transformers 5.17, `vision_utils.py`).

    Args:
        height: Rows of patches, a multiple of `merge_size`.
        width: Columns, likewise.
        merge_size: Side of the blocks of patches that become one token.
        grid_side: Side of the learned grid.

    Returns:
        For P patches: `coordinates` [P, 2] int64, row and column; `corner_indices` [P, 4] int64, the learned positions
        around each; `corner_weights` [P, 4] float32, how near each of these is.
    """
    coordinates = torch.from_numpy(merged_coordinates(height, width, merge_size))
    rows, columns = coordinates.unbind(1)
    row_taps, row_weights = _taps(rows, height, grid_side)
    column_taps, column_weights = _taps(columns, width, grid_side)
    return {
        "coordinates": coordinates.numpy(),
        "corner_indices": (row_taps.unsqueeze(2) * grid_side + column_taps.unsqueeze(1)).view(-1, 4).numpy(),
        "corner_weights": (row_weights.unsqueeze(2) * column_weights.unsqueeze(1)).view(-1, 4).numpy(),
    }


def _taps(indices: torch.Tensor, size: int, grid_side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two nearest places on the learned axis, and their weights, both [P, 2]."""
    places = indices.to(torch.float32) * (grid_side - 1) / max(size - 1, 1)
    below = places.floor()
    share = (places - below).unsqueeze(1)
    taps = torch.stack((below, (below + 1).clamp(max=grid_side - 1)), 1).to(torch.int64)
    return taps, torch.cat((1 - share, share), 1)

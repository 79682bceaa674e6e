"""The vision tower of Gemma 4: a transformer over patches, the mean of squares of them, a norm and a projection.

    patches -> patch embedding + learned rows and columns -> blocks -> mean of 3 x 3, * sqrt(H) -> norm -> projection

Images keep about their shape, see `raypp.models.tower_parts.SegmentTower`. A head's first half is rotated by the
patch's column, its second by its row. Here the outputs of `q_proj` and `k_proj` are sorted so that one rotation of the
whole head does both. The factor of the scores is 1: queries are multiplied by sqrt(D), and scores divided by it.

Source: the published checkpoints' config.json and tensor names; transformers 5.17, `models/gemma4`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray

from raypp.encoder.protocol import Per, TensorSpec
from raypp.models.tower_parts import Block, Layer, PatchEmbedding, SegmentTower, merged_coordinates
from raypp.models.vision_config import VisionConfig
from raypp.models.weights import WeightReader
from raypp.ops.vision import choose_rotate_qk, segment_attention


class Gemma4VisionTower(SegmentTower):
    """A `SupportsEncoderCudaGraph`. P patches, H hidden size of the tower, D of a head."""

    position_inputs = (TensorSpec("coordinates", torch.int64, Per.PATCH, (2,)),)

    def _read(self, config: VisionConfig, whole: WeightReader) -> None:
        weights, hidden, side = whole.below("model.vision_tower."), config.hidden_size, config.patch_size
        embed = weights.below("patch_embedder.")
        by_pixel = embed.tensor("input_proj.weight", hidden, config.patch_dim).view(hidden, side, side, -1)
        self._embed = PatchEmbedding(config, by_pixel.permute(0, 3, 1, 2), None)
        self._columns, self._rows = embed.tensor("position_embedding_table", 2, config.grid_side, hidden)
        layers = weights.below("encoder.layers.")
        self._blocks = [_block(config, layers.below(f"{index}.")) for index in range(config.depth)]
        self._head_norms = [_head_norms(config, layers.below(f"{index}.self_attn.")) for index in range(config.depth)]
        self._standard = None
        if config.is_standardized:
            self._standard = [weights.tensor(name, hidden).float() for name in ("std_bias", "std_scale")]
        projection = whole.below("model.embed_vision.embedding_projection.")
        self._projection = projection.tensor("weight", config.out_hidden_size, hidden)
        self._rotate_qk = choose_rotate_qk(whole.device, whole.dtype)
        exponents = torch.arange(0, config.head_dim // 2, 2, dtype=torch.float32) / (config.head_dim // 2)
        self._inverse_frequencies = (1.0 / config.rope_theta**exponents).to(whole.device)

    def positions(self, height: int, width: int) -> Mapping[str, NDArray[Any]]:
        return _positions(height, width, self._config.spatial_merge_size)

    def forward(self, inputs: Mapping[str, torch.Tensor], max_segment_len: int) -> torch.Tensor:
        config, starts = self._config, inputs["segment_starts"]
        rows, columns = inputs["coordinates"].unbind(1)
        hidden = self._embed(inputs["patches"])
        hidden = hidden + (F.embedding(columns, self._columns) + F.embedding(rows, self._rows))
        places = torch.stack((columns, rows), 1).to(torch.float32)
        angles = (places.unsqueeze(2) * self._inverse_frequencies).view(len(hidden), -1)
        cos, sin = angles.cos(), angles.sin()

        for block, norms in zip(self._blocks, self._head_norms, strict=True):

            def attend(qkv: torch.Tensor, norms: torch.Tensor = norms) -> torch.Tensor:
                normed = F.rms_norm(qkv.float(), qkv.shape[-1:], eps=config.norm_eps) * norms
                q, k, v = self._rotate_qk(normed.to(qkv.dtype), cos, sin).unbind(1)
                return segment_attention(q, k, v, starts, max_segment_len)

            hidden = block(hidden, attend)
        pooled = hidden.float().view(-1, config.patches_per_token, config.hidden_size).mean(1)
        pooled = pooled * config.hidden_size**0.5
        if self._standard is not None:
            bias, scale = self._standard
            pooled = (pooled - bias) * scale
        rounded = pooled.to(hidden.dtype).float()
        normed = F.rms_norm(rounded, (config.hidden_size,), eps=config.norm_eps).to(hidden.dtype)
        return F.linear(normed, self._projection).unsqueeze(0)


@lru_cache(maxsize=256)
def _positions(height: int, width: int, merge_size: int) -> dict[str, NDArray[Any]]:
    return {"coordinates": merged_coordinates(height, width, merge_size)}


def _block(config: VisionConfig, weights: WeightReader) -> Block:
    hidden, intermediate = config.hidden_size, config.intermediate_size

    def norm(name: str) -> Layer:
        weight = weights.tensor(f"{name}.weight", hidden).float()
        return lambda x: F.rms_norm(x.float(), (hidden,), weight, config.norm_eps).to(x.dtype)

    q, k, v = (
        _linear(config, weights.below(f"self_attn.{part}_proj."), hidden, hidden, sorts=part != "v") for part in "qkv"
    )
    output = _linear(config, weights.below("self_attn.o_proj."), hidden, hidden)
    gate, up = (_linear(config, weights.below(f"mlp.{part}_proj."), intermediate, hidden) for part in ("gate", "up"))
    down = _linear(config, weights.below("mlp.down_proj."), hidden, intermediate)
    behind_attention, behind_mlp = norm("post_attention_layernorm"), norm("post_feedforward_layernorm")
    return Block(
        num_heads=config.num_heads,
        norm1=norm("input_layernorm"),
        norm2=norm("pre_feedforward_layernorm"),
        qkv=lambda x: torch.cat((q(x), k(x), v(x)), 1),
        output=lambda x: behind_attention(output(x)),
        up=lambda x: F.gelu(gate(x), approximate="tanh") * up(x),
        down=lambda x: behind_mlp(down(x)),
    )


def _head_norms(config: VisionConfig, weights: WeightReader) -> torch.Tensor:
    """Return what normalized queries, keys and values are multiplied by, [3, 1, D] float32."""
    order, head_dim = _head_order(config.head_dim, weights.device), config.head_dim
    queries, keys = (weights.tensor(f"{part}_norm.weight", head_dim).float()[order] for part in "qk")
    return torch.stack((queries * head_dim**0.5, keys, torch.ones_like(keys))).unsqueeze(1)


def _head_order(head_dim: int, device: torch.device) -> torch.Tensor:
    """Return which element of a head goes where: the first of each pair to its first half, columns before rows."""
    columns, rows = torch.arange(head_dim, device=device).view(2, 2, -1)
    return torch.cat((columns[0], rows[0], columns[1], rows[1]))


def _linear(config: VisionConfig, weights: WeightReader, num_out: int, num_in: int, *, sorts: bool = False) -> Layer:
    """Return a product, of clipped inputs and outputs where the tower has bounds for these.

    Args:
        config: The tower's.
        weights: Of the product and its bounds.
        num_out: Outputs.
        num_in: Inputs.
        sorts: Whether the elements of each head are sorted as `_head_order` says.
    """
    weight = weights.tensor("linear.weight", num_out, num_in)
    if sorts:
        order = _head_order(config.head_dim, weights.device)
        weight = weight.view(-1, config.head_dim, num_in)[:, order].reshape(num_out, num_in)
    if not config.has_clipped_products:
        return lambda x: F.linear(x, weight)
    low, high, least, most = (
        weights.tensor(f"{side}_{bound}") for side in ("input", "output") for bound in ("min", "max")
    )
    return lambda x: F.linear(x.clamp(low, high), weight).clamp(least, most)

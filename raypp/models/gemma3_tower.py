"""The vision tower of Gemma 3: SigLIP, then a mean of squares of patches, a norm and a projection.

    patches -> patch embedding + learned positions -> blocks -> norm -> mean of 4 x 4 -> RMS norm -> a row per token

Every image is a square of one size, so a batch of images is a batch of equal sequences: attention needs no segments,
positions no inputs, and padding is further images. The same forward runs eagerly and inside of graphs; see
`raypp.encoder.protocol`, whose questions are answered here. Patches come square by square, as they are pooled.

Source: the published checkpoints' config.json and tensor names; transformers 5.17, `models/siglip`, `models/gemma3`;
arXiv:2503.19786, section 2.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray

from raypp.encoder.protocol import BatchShape, BudgetRange, EncoderGraphConfig, Per, TensorSpec
from raypp.models.tower_parts import Block, PatchBatch, PatchEmbedding, PatchTower, layer_norm, linear
from raypp.models.vision_config import VisionConfig
from raypp.models.weights import WeightReader
from raypp.ops.host_to_device import concatenated
from raypp.ops.vision import linear_gelu_tanh

_MAX_GRAPH_IMAGES = 4  # of 896 x 896 pixels: more keep an H200 busy for longer than launching takes
_PLACES = [("", "vision_model."), ("", ""), ("model.", "vision_model."), ("model.", "")]
"""Before `vision_tower.` and behind it: the published checkpoints', and those of versions of transformers."""


class Gemma3VisionTower(PatchTower):
    """A `SupportsEncoderCudaGraph`. N patches of an image, H hidden size of the tower."""

    def _read(self, config: VisionConfig, whole: WeightReader) -> None:
        self._num_patches, hidden = config.grid_side**2, config.hidden_size
        places = [(before, f"{before}vision_tower.{inner}") for before, inner in _PLACES]
        has = [place for place in places if whole.below(place[1]).has("post_layernorm.weight")]
        before, prefix = (has or places)[0]
        weights, projector = whole.below(prefix), whole.below(f"{before}multi_modal_projector.")
        patch_shape = (config.in_channels, config.patch_size, config.patch_size)
        embed = weights.below("embeddings.patch_embedding.")
        weight, bias = embed.tensor("weight", hidden, *patch_shape), embed.tensor("bias", hidden)
        self._embed = PatchEmbedding(config, weight, bias)
        positions = weights.tensor("embeddings.position_embedding.weight", self._num_patches, hidden)
        side = config.spatial_merge_size
        squares = positions.view(config.grid_side // side, side, -1, side, hidden).transpose(1, 2)
        self._positions = squares.reshape(self._num_patches, hidden)
        self._blocks = [_block(config, weights.below(f"encoder.layers.{index}.")) for index in range(config.depth)]
        self._norm = layer_norm(weights.below("post_layernorm."), hidden, config.norm_eps)
        self._pooled_norm = 1 + projector.tensor("mm_soft_emb_norm.weight", hidden).float()
        self._projection = projector.tensor("mm_input_projection_weight", hidden, config.out_hidden_size)

    @property
    def _num_tokens(self) -> int:
        return self._num_patches // self._config.patches_per_token

    def graph_config(self) -> EncoderGraphConfig:
        patches = TensorSpec("patches", torch.uint8, Per.PATCH, (self._config.patch_dim,))
        return EncoderGraphConfig(patches_per_token=self._config.patches_per_token, inputs=(patches,))

    def budget_range(self) -> BudgetRange:
        each = self._num_tokens
        return BudgetRange(each, _MAX_GRAPH_IMAGES * each, multiple_of=each)

    def capture_batch(self, shape: BatchShape, num_items: int = 1) -> PatchBatch:
        """Return grey images that fill the shape; how many there are, their size says."""
        num_images = shape.num_tokens // self._num_tokens
        grey = np.full((self._num_patches, self._config.patch_dim), 127, np.uint8)
        side = self._config.grid_side
        return self._batch([b""] * num_images, [(1, side, side)] * num_images, [grey] * num_images)

    def replay_values(self, batch: PatchBatch, shape: BatchShape) -> Mapping[str, torch.Tensor]:
        return batch.values

    def _batch(
        self, keys: Sequence[bytes], grids: Sequence[tuple[int, int, int]], patches: Sequence[NDArray[np.uint8]]
    ) -> PatchBatch:
        return PatchBatch(
            keys=tuple(keys),
            num_tokens=(self._num_tokens,) * len(keys),
            values={"patches": concatenated(patches, self._device)},
            max_segment_len=self._num_patches,
        )

    def forward(self, inputs: Mapping[str, torch.Tensor], max_segment_len: int) -> torch.Tensor:
        config, patches = self._config, inputs["patches"]
        hidden = self._embed(patches).view(-1, self._num_patches, config.hidden_size) + self._positions
        hidden = hidden.view(len(patches), -1)
        for block in self._blocks:
            hidden = block(hidden, self._attend)
        pooled = self._norm(hidden).view(-1, config.patches_per_token, config.hidden_size).mean(1)
        normed = F.rms_norm(pooled.float(), (config.hidden_size,), self._pooled_norm, config.norm_eps)
        return (normed.to(pooled.dtype) @ self._projection).unsqueeze(0)

    def _attend(self, qkv: torch.Tensor) -> torch.Tensor:
        """Return the attention of every patch to those of its image."""
        q, k, v = qkv.view(-1, self._num_patches, *qkv.shape[1:]).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def _block(config: VisionConfig, weights: WeightReader) -> Block:
    hidden, attention = config.hidden_size, weights.below("self_attn.")
    return Block(
        num_heads=config.num_heads,
        norm1=layer_norm(weights.below("layer_norm1."), hidden, config.norm_eps),
        norm2=layer_norm(weights.below("layer_norm2."), hidden, config.norm_eps),
        qkv=linear([attention.below(f"{part}_proj.") for part in "qkv"], hidden, hidden),
        output=linear([attention.below("out_proj.")], hidden, hidden),
        up=linear([weights.below("mlp.fc1.")], config.intermediate_size, hidden, linear_gelu_tanh),
        down=linear([weights.below("mlp.fc2.")], hidden, config.intermediate_size),
    )

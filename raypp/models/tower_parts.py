"""What vision towers have in common: batches of patches, their embedding, blocks, and small layers of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from raypp.encoder.protocol import EncodedItem
from raypp.models.vision_config import VisionConfig
from raypp.models.weights import WeightReader

Layer = Callable[[torch.Tensor], torch.Tensor]
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(x, weight, bias) -> y."""
Attend = Callable[[torch.Tensor], torch.Tensor]
"""qkv [P, 3, heads, D] -> [P, heads, D]."""


@dataclass(frozen=True, eq=False)
class PatchBatch:
    """Pictures that are encoded together, on the host. P patches."""

    keys: tuple[bytes, ...]
    num_tokens: tuple[int, ...]  # of each
    values: Mapping[str, torch.Tensor]  # what the forward reads, by the names of the tower's `graph_config`
    max_segment_len: int  # the most patches of one

    def split(self, output: torch.Tensor) -> list[EncodedItem]:
        """Return the leading rows of `output` [1 + L, T, H], picture by picture, each in memory of its own."""
        rows = output[:, : sum(self.num_tokens)].split(self.num_tokens, dim=1)
        return [
            EncodedItem(key, part.clone(memory_format=torch.contiguous_format))
            for key, part in zip(self.keys, rows, strict=True)
        ]


class PatchEmbedding:
    """Pixels to hidden states, patch by patch.

    Args:
        config: The tower's.
        weights: Of the convolution.
        shape: Of its weight behind the hidden size.
    """

    def __init__(self, config: VisionConfig, weights: WeightReader, *shape: int) -> None:
        # A convolution whose steps are as long as its kernel is one product.
        self._weight = weights.tensor("weight", config.hidden_size, *shape).view(config.hidden_size, -1)
        self._bias = weights.tensor("bias", config.hidden_size)
        # (pixel / 255 - mean) / std as one product and one sum per number of a patch.
        device, per_channel = weights.device, config.patch_dim // config.in_channels
        mean, std = (torch.tensor(values, device=device) for values in (config.image_mean, config.image_std))
        self._scale = (1 / (255 * std)).repeat_interleave(per_channel)
        self._shift = (-mean / std).repeat_interleave(per_channel)

    def __call__(self, patches: torch.Tensor) -> torch.Tensor:
        """Return [P, H]. Shapes: patches [P, patch_dim] uint8."""
        pixels = torch.addcmul(self._shift, patches.to(torch.float32), self._scale)
        return F.linear(pixels.to(self._weight.dtype), self._weight, self._bias)


@dataclass(frozen=True, eq=False, kw_only=True)
class Block:
    """hidden + attention(norm(hidden)), then + MLP(norm(...))."""

    num_heads: int
    norm1: Layer
    norm2: Layer
    qkv: Layer
    output: Layer
    up: Layer  # with its activation
    down: Layer

    def __call__(self, hidden: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Return [P, H]. Shapes: hidden [P, H]."""
        qkv = self.qkv(self.norm1(hidden)).view(len(hidden), 3, self.num_heads, -1)
        hidden = hidden + self.output(attend(qkv).reshape(len(hidden), -1))
        return hidden + self.down(self.up(self.norm2(hidden)))


def linear(parts: list[WeightReader], num_out: int, num_in: int, product: Product = F.linear) -> Layer:
    """Return a product with bias, whose outputs are those of some parts, `num_out` each, one after the other."""
    weight = torch.cat([part.tensor("weight", num_out, num_in) for part in parts])
    bias = torch.cat([part.tensor("bias", num_out) for part in parts])
    return lambda x: product(x, weight, bias)


def layer_norm(weights: WeightReader, size: int, eps: float) -> Layer:
    """Return a norm with mean and bias."""
    weight, bias = weights.tensor("weight", size), weights.tensor("bias", size)
    return lambda x: F.layer_norm(x, (size,), weight, bias, eps)

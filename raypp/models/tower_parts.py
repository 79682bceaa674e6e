"""What vision towers have in common: batches of patches, their embedding, blocks, and small layers of a checkpoint.

A `SegmentTower` is a `PatchTower` for images of any sizes: each is a segment of a batch, and attends to itself alone.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray

from raypp.encoder.protocol import (
    BatchShape,
    BudgetRange,
    EncodedItem,
    EncoderGraphConfig,
    Per,
    SupportsEncoderCudaGraph,
    TensorSpec,
)
from raypp.models.vision_config import VisionConfig
from raypp.models.weights import WeightReader, WeightSource
from raypp.ops.host_to_device import concatenated
from raypp.prompt_items import EncoderItem

_MAX_GRAPH_TOKENS = 2048  # of 32 x 32 pixels each; more keep an H200 busy for longer than launching takes

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
        weight: [H, ...], of a convolution: channels, frames, rows and columns of a patch. Its steps are as long as its
            kernel, so it is one product.
        bias: [H]; None: there is none.
    """

    def __init__(self, config: VisionConfig, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight.reshape(config.hidden_size, -1), bias
        # (pixel / 255 - mean) / std as one product and one sum per number of a patch.
        device, per_channel = weight.device, config.patch_dim // config.in_channels
        mean, std = (torch.tensor(values, device=device) for values in (config.image_mean, config.image_std))
        self._scale = (1 / (255 * std)).repeat_interleave(per_channel)
        self._shift = (-mean / std).repeat_interleave(per_channel)

    def __call__(self, patches: torch.Tensor) -> torch.Tensor:
        """Return [P, H]. Shapes: patches [P, patch_dim] uint8."""
        pixels = torch.addcmul(self._shift, patches.to(torch.float32), self._scale)
        return F.linear(pixels.to(self._weight.dtype), self._weight, self._bias)


class PatchTower(SupportsEncoderCudaGraph[PatchBatch]):
    """A tower of patches, but for its layers, and for what its graphs are made for.

    Args:
        config: The tower's.
        dtype: Of weights and activations; the rows come out in it.
        device: Where they are.
        source: Weights, by the names of the checkpoint.

    Raises:
        ModelLoadError: a tensor is missing, has the wrong shape, or cannot be read.
    """

    def __init__(self, config: VisionConfig, dtype: torch.dtype, device: torch.device, source: WeightSource) -> None:
        self._config = config
        self._device = device
        self._read(config, WeightReader(source, dtype, device))

    @abstractmethod
    def _read(self, config: VisionConfig, whole: WeightReader) -> None:
        """Read the layers."""

    @abstractmethod
    def forward(self, inputs: Mapping[str, torch.Tensor], max_segment_len: int) -> torch.Tensor:
        """Return rows [1 + L, T, out_hidden_size] of what `graph_config` names; no image has more patches."""

    @abstractmethod
    def _batch(
        self, keys: Sequence[bytes], grids: Sequence[tuple[int, int, int]], patches: Sequence[NDArray[np.uint8]]
    ) -> PatchBatch:
        """Return images as a batch: their keys, their rows and columns of patches, and all patches in order."""

    @property
    def out_hidden_size(self) -> int:
        """Of the rows: the language model's."""
        return self._config.out_hidden_size

    def select_items(self, items: Sequence[EncoderItem], indices: Sequence[int]) -> PatchBatch:
        chosen = [items[index] for index in indices]
        return self._batch(
            [item.key for item in chosen],
            [item.grid_thw for item in chosen],
            [item.patches for item in chosen],
        )

    def captured_forward(self, inputs: Mapping[str, torch.Tensor], shape: BatchShape) -> torch.Tensor:
        return self.forward(inputs, shape.num_tokens * self._config.patches_per_token)

    def eager_forward(self, batch: PatchBatch) -> torch.Tensor:
        inputs = {name: values.to(self._device, non_blocking=True) for name, values in batch.values.items()}
        return self.forward(inputs, batch.max_segment_len)

    def split_output(self, output: torch.Tensor, batch: PatchBatch) -> list[EncodedItem]:
        return batch.split(output)


class SegmentTower(PatchTower):
    """A tower whose images are of any sizes."""

    position_inputs: ClassVar[tuple[TensorSpec, ...]]
    """What `positions` returns."""

    @abstractmethod
    def positions(self, height: int, width: int) -> Mapping[str, NDArray[Any]]:
        """Return where the patches of an image of so many rows and columns of patches lie, [P, ...] each."""

    def graph_config(self) -> EncoderGraphConfig:
        return EncoderGraphConfig(
            patches_per_token=self._config.patches_per_token,
            inputs=(
                TensorSpec("patches", torch.uint8, Per.PATCH, (self._config.patch_dim,)),
                *self.position_inputs,
                TensorSpec("segment_starts", torch.int32, Per.ITEM, (), extra_rows=2),
            ),
        )

    def budget_range(self) -> BudgetRange:
        config = self._config
        smallest = max(config.image_pixels.min_pixels // config.side_factor**2, 1)
        return BudgetRange(smallest, max(smallest, min(_MAX_GRAPH_TOKENS, config.tokens_per_max_image)))

    def capture_batch(self, shape: BatchShape, num_items: int = 1) -> PatchBatch:
        """Return grey images that fill the shape, as many as asked for."""
        merge = self._config.spatial_merge_size
        each, left = divmod(shape.num_tokens, num_items)
        grids = [(1, merge, merge * (each + (index < left))) for index in range(num_items)]
        num_patches = shape.num_tokens * self._config.patches_per_token
        return self._batch([b""] * num_items, grids, [np.full((num_patches, self._config.patch_dim), 127, np.uint8)])

    def replay_values(self, batch: PatchBatch, shape: BatchShape) -> Mapping[str, torch.Tensor]:
        """Return what the buffers must hold: padding is one more segment, behind the images."""
        starts = batch.values["segment_starts"].numpy()
        end = shape.num_tokens * self._config.patches_per_token
        ends = np.full(shape.max_items + 2 - len(starts), end, np.int32)
        return {**batch.values, "segment_starts": concatenated([starts, ends], self._device)}

    def _batch(
        self, keys: Sequence[bytes], grids: Sequence[tuple[int, int, int]], patches: Sequence[NDArray[np.uint8]]
    ) -> PatchBatch:
        assert all(time == 1 for time, _, _ in grids), "frames that are apart in time are items of their own"
        positions = [self.positions(h, w) for _, h, w in grids]
        lens = [h * w for _, h, w in grids]
        parts = {
            "patches": patches,
            **{name: [of_grid[name] for of_grid in positions] for name in positions[0]},
            "segment_starts": [np.cumsum([0, *lens], dtype=np.int32)],
        }
        return PatchBatch(
            keys=tuple(keys),
            num_tokens=tuple(length // self._config.patches_per_token for length in lens),
            values={name: concatenated(arrays, self._device) for name, arrays in parts.items()},
            max_segment_len=max(lens),
        )


def merged_coordinates(height: int, width: int, merge_size: int) -> NDArray[np.int64]:
    """Return rows and columns of an image's patches in the order in which they are merged, [P, 2].

    That is block by block, and row by row within a block.
    """
    rows, columns = np.indices((height, width))
    blocks = (height // merge_size, merge_size, width // merge_size, merge_size)
    return np.stack([axis.reshape(blocks).swapaxes(1, 2).reshape(-1) for axis in (rows, columns)], 1)


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

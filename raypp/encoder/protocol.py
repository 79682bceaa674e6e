"""The protocol of models that encoders run: sizes, layout of inputs, and the forward pass.

An encoder turns items (images) into embeddings. A captured batch has a fixed size, the *budget*; the items in it take
the leading rows of its buffers, and padding takes the rest. Everything that depends on the items is worked out on the
host, before the graph is replayed, and lies in the buffers: the captured forward reads nothing else.

    items --select_items--> batch --replay_values--> buffers --captured_forward--> output --split_output--> EncodedItem
                              +------------------ eager_forward --------------------^

The idea, and its cut into these questions, is that of vLLM's `SupportsEncoderCudaGraph` (0.26, PR 35963). Here a batch
may be of any type, the model's own, and the manager allocates the buffers, once for all budgets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeVar

import torch

from raypp.encoder.encoded_item import EncodedItem
from raypp.prompt_items import EncoderItem

BatchT = TypeVar("BatchT")
"""What a model makes of several items on the host: its own affair."""


class Per(Enum):
    """What the rows of a buffer count."""

    TOKEN = "token"
    PATCH = "patch"
    ITEM = "item"


@dataclass(frozen=True)
class BatchShape:
    """The size of a captured batch. Padding comes on top of the items: a dummy sequence may take one more entry."""

    num_tokens: int  # the budget: tokens of all items together, padding included
    max_items: int


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a batch: `[rows, *trailing]`."""

    name: str
    dtype: torch.dtype
    per: Per
    trailing: tuple[int, ...] = ()
    extra_rows: int = 0  # beside those that `per` counts, e.g. 2 for prefix sums with an entry for padding


@dataclass(frozen=True)
class EncoderGraphConfig:
    """What does not change from batch to batch."""

    modalities: tuple[str, ...]  # of the items that the model takes, e.g. ("image",)
    patches_per_token: int  # the most patches that an item may have for each of its tokens
    inputs: tuple[TensorSpec, ...]  # what `captured_forward` reads


@dataclass(frozen=True)
class BudgetRange:
    """Budgets that are worth a graph."""

    min_tokens: int  # the smallest item
    max_tokens: int  # beyond it, computing takes so long that launching costs nothing


@dataclass(frozen=True)
class ItemSpec:
    """The size of one item."""

    num_tokens: int
    num_patches: int


class SupportsEncoderCudaGraph(Protocol[BatchT]):
    """An encoder model whose forward can be captured for batches of a fixed size.

    T tokens of the batch, padding included; L deepstack rows; H hidden size of the language model. All computation is
    on the model's device, in the current stream.
    """

    def graph_config(self) -> EncoderGraphConfig:
        """Return what the buffers look like."""

    def budget_range(self) -> BudgetRange:
        """Return the budgets that are worth a graph."""

    def item_specs(self, items: Sequence[EncoderItem]) -> list[ItemSpec]:
        """Return the items' sizes."""

    def select_items(self, items: Sequence[EncoderItem], indices: Sequence[int]) -> BatchT:
        """Return a batch of some of the items, in the order of `indices`. All on the host, not padded.

        What goes to a GPU should lie in page-locked memory, see `raypp.ops.host_to_device`.
        """

    def capture_batch(self, shape: BatchShape, num_items: int = 1) -> BatchT:
        """Return a batch of equal items that fills the shape: what graphs are captured with, and measured."""

    def replay_values(self, batch: BatchT, shape: BatchShape) -> Mapping[str, torch.Tensor]:
        """Return what each buffer must hold for the batch padded to `shape`, by name, on the host, never to change.

        Shorter than its buffer is a tensor whose other rows may hold anything finite: what an earlier batch left. The
        padding belongs to a dummy sequence, so that no item sees it.
        """

    def captured_forward(self, inputs: Mapping[str, torch.Tensor], shape: BatchShape) -> torch.Tensor:
        """Encode what the buffers hold; return [1 + L, T, H].

        It must not wait for the device, read anything from the host, or depend on the items otherwise than by `inputs`.
        """

    def eager_forward(self, batch: BatchT) -> torch.Tensor:
        """Encode a batch of any size, not padded; return [1 + L, T, H]."""

    def split_output(self, output: torch.Tensor, batch: BatchT) -> list[EncodedItem]:
        """Return the leading rows of `output` [1 + L, T, H], item by item, each in memory of its own."""

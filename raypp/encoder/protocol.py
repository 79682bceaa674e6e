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
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from raypp.errors import RayppError
from raypp.prompt_items import EncoderItem

if TYPE_CHECKING:  # what is sent needs no torch
    import torch


@dataclass(frozen=True)
class ItemFault:
    """An item that cannot be encoded, through its own fault or for want of memory."""

    key: bytes
    error: RayppError


@dataclass(frozen=True, kw_only=True)
class EncoderSpec:
    """One encoder of an engine; all of them are alike but for their index."""

    encoder_index: int
    model_path: str
    load_format: Literal["auto", "dummy"]
    dtype: str  # a torch dtype's name: the stages' own
    device: str  # a torch device
    seed: int
    num_threads: int
    captures: bool  # whether batches are CUDA graphs; else the same batches are encoded by calls
    token_budgets: tuple[int, ...] | None  # None: what the model needs and the memory allows
    max_images_per_batch: int
    memory_bytes: int  # of the device, weights included; 0 on a CPU
    cache_bytes: int
    link_bytes: int  # memory of the first stage that it may write into


@dataclass(frozen=True, eq=False, slots=True)
class EncodedItem:
    """What stands for one item in the language model: one tensor, so that it travels in one message.

    N tokens, H hidden size of the language model, L of its leading layers that take a row too (deepstack; 0 for most).
    """

    key: bytes  # of the `EncoderItem`
    # [1 + L, N, H] of the stages' type and device, contiguous; the first are what the placeholders' tokens become
    rows: torch.Tensor

    @property
    def deepstack(self) -> torch.Tensor:
        """What is added to the residual stream after each of the first L layers, [L, N, H]."""
        return self.rows[1:]

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows."""
        return self.rows.numel() * self.rows.element_size()


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

    patches_per_token: int  # the most patches that an item may have for each of its tokens
    inputs: tuple[TensorSpec, ...]  # what `captured_forward` reads


@dataclass(frozen=True)
class BudgetRange:
    """Budgets that are worth a graph."""

    min_tokens: int  # the smallest item
    max_tokens: int  # beyond it, computing takes so long that launching costs nothing
    multiple_of: int = 1  # what the tokens of every item are a multiple of, and so of every budget


class SupportsEncoderCudaGraph(Protocol[BatchT]):
    """An encoder model whose forward can be captured for batches of a fixed size.

    T tokens of the batch, padding included; L deepstack rows; H hidden size of the language model. All computation is
    on the model's device, in the current stream.
    """

    def graph_config(self) -> EncoderGraphConfig:
        """Return what the buffers look like."""

    def budget_range(self) -> BudgetRange:
        """Return the budgets that are worth a graph."""

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

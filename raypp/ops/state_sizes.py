"""How much a layer with a state per row keeps. Needs no torch, so that planning stays cheap."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class RowState:
    """What a layer keeps of a row, however long the row is: see `raypp.ops.row_state`."""

    num_k_heads: int
    num_v_heads: int  # a multiple of the other
    k_dim: int  # of a head of queries and keys
    v_dim: int  # of a head of values
    kernel_size: int  # tokens that the convolution sees
    state_dtype: str  # a torch dtype's name

    @property
    def conv_dim(self) -> int:
        """Elements of a token's input of the convolution: queries, keys and values."""
        return 2 * self.num_k_heads * self.k_dim + self.num_v_heads * self.v_dim

    def checkpoint_bytes(self, state_bytes: int) -> int:
        """Return what a row's state takes, with elements of `state_bytes`."""
        return self.num_v_heads * self.k_dim * self.v_dim * state_bytes

    def bytes_per_row(
        self, block_size: int, max_drafts: int, dtype_bytes: int, state_bytes: int, *, has_snapshots: bool
    ) -> int:
        """Return what a row takes: its checkpoint and its rings.

        Args:
            block_size: Tokens between two checkpoints.
            max_drafts: K, of a step.
            dtype_bytes: Of an activation.
            state_bytes: Of an element of the state.
            has_snapshots: See `conv_entries`.
        """
        entry = (self.num_k_heads * self.k_dim + self.num_v_heads * self.v_dim) * dtype_bytes + self.num_v_heads * 4
        num_inputs = conv_entries(self.kernel_size, max_drafts, block_size if has_snapshots else 0)
        inputs = num_inputs * self.conv_dim * dtype_bytes
        return self.checkpoint_bytes(state_bytes) + ring_entries(block_size, max_drafts) * entry + inputs


@dataclass(frozen=True)
class StateTensor:
    """A tensor of a cache of transformers, of one row."""

    kind: str  # the field of the cache's layer
    index: int  # in that field
    shape: tuple[int, ...]
    dtype: str  # a torch dtype's name; empty: that of activations


@dataclass(frozen=True)
class ModuleState:
    """What a module of transformers keeps of a row: its part of transformers' cache, and a ring of its inputs."""

    name: str  # of the module, in its layer
    width: int  # elements of a token's input
    tensors: tuple[StateTensor, ...]
    takes_several: bool  # whether several tokens at once can follow a state

    def bytes_per_row(self, block_size: int, max_drafts: int, dtype_bytes: int, state_bytes: Mapping[str, int]) -> int:
        """Return what a row takes: its checkpoint and its ring; see `RowState.bytes_per_row`.

        Args:
            block_size: See there.
            max_drafts: See there.
            dtype_bytes: See there.
            state_bytes: By a dtype's name.
        """
        kept = sum(
            math.prod(each.shape) * (max(dtype_bytes, state_bytes[each.dtype]) if each.dtype else dtype_bytes)
            for each in self.tensors
        )
        return kept + ring_entries(block_size, max_drafts) * self.width * dtype_bytes


def ring_entries(block_size: int, max_drafts: int) -> int:
    """Return the tokens behind a checkpoint that a row keeps: no two that a step may read or write share a place.

    Before a step the checkpoint lies up to block_size + K tokens behind the row's last known token, of which K + 1 were
    computed by the step before; this one writes K + 1.
    """
    return block_size + 2 * max_drafts + 1


def conv_entries(kernel_size: int, max_drafts: int, num_behind: int = 0) -> int:
    """Return the tokens whose inputs of the convolution a row keeps.

    Those that the first token of a step sees, and the K + 1 that the step writes. A row that goes on from its
    checkpoint, when another one begins with a snapshot of it, sees those before that: up to a block behind.
    """
    return kernel_size + max_drafts + num_behind

"""What a gated delta net keeps of a row: a checkpoint of its state, and rings of later tokens' inputs, by position.

    S_t = g_t S_{t-1} + k_t u_t^T        u_t = beta_t (v_t - (g_t S_{t-1})^T k_t)        o_t = S_t^T q_t

A state that every step rewrites cannot be computed again. So a row's state is stored at one position, its checkpoint,
and a ring holds k, u and log g of the tokens behind it: a step computes from both, and writes its own tokens' entries.
A position that is computed again (a late mask, rejected drafts, a step past the row's end) overwrites its own entry.

A step that starts at position p first moves the checkpoint to the last multiple of the block size up to p: all tokens
before p are final. At the end of a prompt's chunk it stands at the last multiple before the chunk's last token, which a
late mask may have computed again. So where a checkpoint stands, and what is in it, depends on positions alone. Row
states belong to rows of the tables, not to blocks; padding has a row of its own.

A copy of a row, a snapshot, lets another request begin where the checkpoint stands, if its tokens up to there are the
same. Snapshots are further rows of the tables.

Source of the rule: ReplaySSM (2026); of the layer: arXiv:2412.06464, transformers 5.17, `models/qwen3_next`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from raypp.ops.kv_cache import LayerCache, sides
from raypp.ops.state_sizes import ModuleState, RowState, conv_entries, ring_entries


class LayerState(NamedTuple):
    """What one layer keeps of all rows. R and X entries of the rings, C elements of a token's convolution."""

    states: torch.Tensor  # [rows, Hv, Dk, Dv]; what is there counts only where a checkpoint stands above 0
    keys: torch.Tensor  # [rows, R, Hk, Dk], of length one; position p is entry p % R, and so below
    values: torch.Tensor  # [rows, R, Hv, Dv] u
    log_decays: torch.Tensor  # [rows, R, Hv] float32
    inputs: torch.Tensor  # [rows, X, C] of the convolution


class ModuleMemory(NamedTuple):
    """What one module of transformers keeps of all rows."""

    inputs: torch.Tensor  # [rows, R, W] of the module; position p is entry p % R
    tensors: tuple[torch.Tensor, ...]  # [rows, ...] each, of its cache, at the checkpoint


class ModulesMemory(NamedTuple):
    """What one layer of transformers' modules keeps, if some keep states of rows, or none keeps anything."""

    cache: LayerCache | None  # of attention
    modules: tuple[ModuleMemory, ...]


LayerMemory = LayerCache | LayerState | ModulesMemory
"""What a layer keeps of the tokens that it saw."""


@dataclass(frozen=True, eq=False)
class DeltaHeads:
    """The weights of a gated delta net between its projections."""

    shape: RowState
    conv_weight: torch.Tensor  # [C, kernel size] for queries, keys and values, in this order
    a_log: torch.Tensor  # [Hv] float32: g = exp(-exp(a_log) softplus(a + dt_bias))
    dt_bias: torch.Tensor  # [Hv] float32
    norm_weight: torch.Tensor  # [Dv]
    eps: float  # of the norm


@dataclass(frozen=True, eq=False)
class RowSpans:
    """Which positions a step computes of which rows, and where their checkpoints stand. R rows, decode rows first."""

    rows: torch.Tensor  # [R] int64, of the tables
    starts: torch.Tensor  # [R] int32, the first position that the step computes
    query_start_loc: torch.Tensor  # [R + 1] int32, where each row's tokens begin in the step
    token_rows: torch.Tensor  # [T] int64, each token's index into `rows`
    held: torch.Tensor  # [R] int32, the tokens that the checkpoint covers before the step
    kept: torch.Tensor  # [R] int32, and after it


class Checkpoints:
    """Where the checkpoints of all rows stand, the same in all layers of a stage.

    Args:
        num_rows: Of the tables; snapshots are rows, too.
        block_size: Tokens between two checkpoints.
        device: Of the stage.
        memories: What the stage's layers keep.
    """

    def __init__(
        self, num_rows: int, block_size: int, device: torch.device, memories: Sequence[LayerMemory] = ()
    ) -> None:
        self._block_size = block_size
        self._of_rows: dict[int, list[list[torch.Tensor]]] = {}
        self.positions = torch.zeros(num_rows, dtype=torch.int32, device=device)
        """[num_rows] int32, at an address that never changes."""
        self.tables = [self.positions, *moved_on(memories)]
        """All that rows have, [num_rows, ...] each."""

    def start(self, rows: torch.Tensor) -> None:
        """Begin with rows anew. Shapes: rows [S] int64."""
        self.positions.index_fill_(0, rows, 0)

    def copy(self, source: int, target: int) -> None:
        """Let a row have what another one has, in a launch or two however many layers there are."""
        for into, parts in zip(self._parts_of(target), self._parts_of(source), strict=True):
            torch._foreach_copy_(into, parts)

    def _parts_of(self, row: int) -> list[list[torch.Tensor]]:
        """Return all that a row has, in lists of one type each."""
        if row not in self._of_rows:
            parts: dict[torch.dtype, list[torch.Tensor]] = {}
            for tensor in self.tables:
                parts.setdefault(tensor.dtype, []).append(tensor[row])
            self._of_rows[row] = list(parts.values())
        return self._of_rows[row]

    def spans(
        self,
        rows: torch.Tensor,
        starts: torch.Tensor,
        query_start_loc: torch.Tensor,
        token_rows: torch.Tensor,
        num_decode_rows: int,
    ) -> RowSpans:
        """Return what a step of these rows computes, and note where it leaves their checkpoints.

        Waits for nothing; graphs can hold it. Shapes: as in `RowSpans`.
        """
        held = self.positions.index_select(0, rows)
        kept = moved(starts, query_start_loc, num_decode_rows, self._block_size)
        self.positions.index_copy_(0, rows, kept)
        return RowSpans(rows, starts, query_start_loc, token_rows, held, kept)


def moved(starts: torch.Tensor, query_start_loc: torch.Tensor, num_decode_rows: int, block_size: int) -> torch.Tensor:
    """Return where checkpoints stand after a step, [R] int32.

    Which of its tokens a decode row keeps is not known yet, so only what was there before counts.
    """
    known = starts
    if num_decode_rows < len(starts):
        ends = starts + query_start_loc.diff() - 1
        known = torch.cat((starts[:num_decode_rows], ends[num_decode_rows:]))
    return (known // block_size) * block_size


def allocate_layer_state(
    shape: RowState,
    num_rows: int,
    block_size: int,
    max_drafts: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    has_snapshots: bool,
) -> LayerState:
    """Return one layer's states and rings, of `dtype`, all zeros: what no token has written must still be finite."""
    num_ring = ring_entries(block_size, max_drafts)
    num_inputs = conv_entries(shape.kernel_size, max_drafts, block_size if has_snapshots else 0)
    heads_k, heads_v, k_dim, v_dim = shape.num_k_heads, shape.num_v_heads, shape.k_dim, shape.v_dim
    state_dtype = torch.promote_types(dtype, getattr(torch, shape.state_dtype))

    def zeros(*sizes: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(num_rows, *sizes, dtype=of, device=device)

    return LayerState(
        zeros(heads_v, k_dim, v_dim, of=state_dtype),
        zeros(num_ring, heads_k, k_dim),
        zeros(num_ring, heads_v, v_dim),
        zeros(num_ring, heads_v, of=torch.float32),
        zeros(num_inputs, shape.conv_dim),
    )


def allocate_module_memory(
    shape: ModuleState, num_rows: int, block_size: int, max_drafts: int, dtype: torch.dtype, device: torch.device
) -> ModuleMemory:
    """Return what one module keeps of all rows, all zeros."""
    ring = torch.zeros(num_rows, ring_entries(block_size, max_drafts), shape.width, dtype=dtype, device=device)
    tensors = [
        torch.zeros(
            num_rows,
            *each.shape,
            dtype=torch.promote_types(dtype, getattr(torch, each.dtype)) if each.dtype else dtype,
            device=device,
        )
        for each in shape.tensors
    ]
    return ModuleMemory(ring, tuple(tensors))


def written_once(memories: Sequence[LayerMemory]) -> list[torch.Tensor]:
    """Return what layers keep that a step may write twice without another outcome: keys, values, keys, ..."""
    caches = [memory.cache if isinstance(memory, ModulesMemory) else memory for memory in memories]
    return sides([cache for cache in caches if isinstance(cache, LayerCache)])


def moved_on(memories: Sequence[LayerMemory]) -> list[torch.Tensor]:
    """Return what layers keep that a step moves on: states and rings."""
    of_layers = [tensor for memory in memories if isinstance(memory, LayerState) for tensor in memory]
    modules = [each for memory in memories if isinstance(memory, ModulesMemory) for each in memory.modules]
    return of_layers + [tensor for inputs, tensors in modules for tensor in (inputs, *tensors)]

"""The heads of a layer, and a step's decode and prefill rows as attention over the paged KV cache sees them.

A step's tokens lie in one dimension, decode rows first. All decode rows have the same number of query tokens, 1 + K;
prefill rows have any. Queries attend causally to their row's cache, this step's tokens included.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch


@dataclass(frozen=True, eq=False)
class HeadNorm:
    """The norm of each query and key head before it is rotated (Qwen3)."""

    q_weight: torch.Tensor  # [D]
    k_weight: torch.Tensor  # [D]
    eps: float


@dataclass(frozen=True, eq=False)
class Heads:
    """The heads of a layer: how its projection is cut, and what happens to them before attention."""

    num_heads: int  # Hq
    num_kv_heads: int  # Hk, a divisor of Hq
    head_dim: int  # D
    norm: HeadNorm | None = None
    k_scale: float = 1.0
    """What keys are divided by before a cache in 8 bits holds them; a cache of more bits holds them as they are."""
    v_scale: float = 1.0
    """The same of values."""

    @cached_property
    def scale(self) -> float:
        """The factor of the scores."""
        return float(self.head_dim**-0.5)


@dataclass(eq=False, slots=True)
class AttentionBatch:
    """A step as attention sees it; the same for all layers. R rows, T tokens.

    Tensors are exact, and on the device. Integers are what the host knows when it plans: upper bounds where a row's
    length depends on steps still in flight.
    """

    num_decode_rows: int
    decode_query_len: int  # 1 + K
    seq_lens: torch.Tensor  # [R] int32, this step's tokens included
    block_tables: torch.Tensor  # [R, blocks] int32
    slot_mapping: torch.Tensor  # [T] int64
    prefill_query_lens: list[int]
    prefill_seq_lens: list[int]
    plan: object = None
    """What the kernel set prepared for all layers; see `raypp.ops.backend.KernelSet.plan_attention`."""
    padded_out: torch.Tensor | None = None
    """[P, Hq * D] for a step that is padded to P tokens: where every layer's attention writes its T rows. Padding lies
    behind the step's tokens, belongs to no row, and `slot_mapping` [P] sends it to the null block."""

    @property
    def num_tokens(self) -> int:
        """T, without padding."""
        return self.num_decode_rows * self.decode_query_len + sum(self.prefill_query_lens)

    def adopt(self, step: AttentionBatch) -> None:
        """Take over that step's fields, all but `slot_mapping` and `padded_out`, whose addresses stay."""
        self.num_decode_rows = step.num_decode_rows
        self.decode_query_len = step.decode_query_len
        self.seq_lens = step.seq_lens
        self.block_tables = step.block_tables
        self.prefill_query_lens = step.prefill_query_lens
        self.prefill_seq_lens = step.prefill_seq_lens
        self.plan = step.plan


class Rotation(NamedTuple):
    """Cosines and sines of a step's tokens. T tokens, D head_dim.

    Of `rotation`: cos [T, 1, 1, D / 2]; sin [T, 1, 2, D / 2], minus the sine for the first half of a head, the sine for
    the second. Kernels have shapes of their own, see `raypp.ops.cuda.heads`.
    """

    cos: torch.Tensor
    sin: torch.Tensor


def rotary_angles(positions: torch.Tensor, inverse_frequencies: torch.Tensor) -> torch.Tensor:
    """Return each token's angles, float32 [T, D / 2].

    Shapes: positions [T] int64 and inverse_frequencies [D / 2] float32; or, for positions along A axes, [T, A] and
    [A, D / 2], whose angles are added up.
    """
    angles = positions.to(torch.float32).unsqueeze(-1) * inverse_frequencies
    return angles if positions.ndim == 1 else angles.sum(1)


def rotation(
    positions: torch.Tensor, inverse_frequencies: torch.Tensor, dtype: torch.dtype, scale: float = 1.0
) -> Rotation:
    """Return the rotation of tokens at `positions` by `inverse_frequencies`, see `rotary_angles`.

    Angles, sines and cosines are float32 whatever `dtype` says of the result. These are multiplied by `scale`, as some
    stretched embeddings have it: queries and keys grow, and attention is sharper.
    """
    angles = rotary_angles(positions, inverse_frequencies)
    cos, sin = angles.cos(), angles.sin()
    if scale != 1.0:
        cos, sin = cos * scale, sin * scale
    signed_sin = torch.stack((-sin, sin), 1).unsqueeze(1)
    return Rotation(cos.to(dtype).view(-1, 1, 1, angles.shape[1]), signed_sin.to(dtype))


def apply_rotary(heads: torch.Tensor, rope: Rotation) -> torch.Tensor:
    """Return the heads rotated. Shapes: heads [T, any number, D]; so queries and keys are one call."""
    halves = heads.view(heads.shape[0], heads.shape[1], 2, -1)
    # (a, b) -> (a cos - b sin, b cos + a sin), as one product and one fused addition over both halves.
    return torch.addcmul(halves * rope.cos, halves.flip(-2), rope.sin).view(heads.shape)

"""The heads of a layer, and a step's decode and prefill rows as attention over the paged KV cache sees them.

A step's tokens lie in one dimension, decode rows first. All decode rows have the same number of query tokens, 1 + K;
prefill rows have any. Queries attend causally to their row's cache, this step's tokens included.
"""

from __future__ import annotations

from dataclasses import dataclass

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

    @property
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

    def follow(self, step: AttentionBatch) -> None:
        """Take over that step's fields, all but `slot_mapping` and `padded_out`, whose addresses stay."""
        self.num_decode_rows = step.num_decode_rows
        self.decode_query_len = step.decode_query_len
        self.seq_lens = step.seq_lens
        self.block_tables = step.block_tables
        self.prefill_query_lens = step.prefill_query_lens
        self.prefill_seq_lens = step.prefill_seq_lens
        self.plan = step.plan

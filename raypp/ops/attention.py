"""Attention over the paged KV cache, for a step that mixes decode and prefill rows.

A step's tokens lie in one dimension, decode rows first. All decode rows have the same number of query tokens, 1 + K;
prefill rows have any. Queries attend causally to their row's cache, this step's tokens included.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from raypp.ops.cpu_attention import AttentionPlan, plan_attention, run_attention


@dataclass(eq=False, slots=True)
class AttentionBatch:
    """What attention must know of a step; the same for all layers. R rows, T tokens.

    Tensors are the truth and live on the device; the integers are what the host knows when it plans, upper bounds where
    a row's length depends on steps still in flight.
    """

    num_decode_rows: int
    decode_query_len: int  # 1 + K
    query_start_loc: torch.Tensor  # [R + 1] int32
    seq_lens: torch.Tensor  # [R] int32, this step's tokens included
    block_tables: torch.Tensor  # [R, blocks] int32
    slot_mapping: torch.Tensor  # [T] int64
    max_decode_seq_len: int
    prefill_query_lens: list[int]
    prefill_seq_lens: list[int]
    _plan: AttentionPlan | None = field(default=None, init=False, repr=False)


def paged_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, batch: AttentionBatch, scale: float
) -> torch.Tensor:
    """Write the step's keys and values into the cache and return the attention's output, [T, Hq, D].

    Shapes: q [T, Hq, D]; k, v [T, Hk, D], Hq a multiple of Hk; kv_cache [2, num_blocks, Hk, block_size, D], written in
    place. What a row computes past the end of its block table is finite and meaningless; nobody reads it.

    Args:
        q: Queries.
        k: Keys of the step's tokens.
        v: Values of the step's tokens.
        kv_cache: The layer's cache, see `raypp.ops.kv_cache`.
        batch: The step.
        scale: Multiplies the scores, usually D ** -0.5.
    """
    plan = batch._plan
    if plan is None:  # the first layer prepares for all: they differ in nothing that the plan depends on
        plan = batch._plan = plan_attention(
            kv_cache,
            num_heads=q.shape[1],
            num_decode_rows=batch.num_decode_rows,
            decode_query_len=batch.decode_query_len,
            seq_lens=batch.seq_lens,
            block_tables=batch.block_tables,
            slot_mapping=batch.slot_mapping,
            prefill_query_lens=batch.prefill_query_lens,
            prefill_seq_lens=batch.prefill_seq_lens,
        )
    return run_attention(q, k, v, kv_cache, plan, scale)

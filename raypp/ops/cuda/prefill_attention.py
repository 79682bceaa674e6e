"""Attention of prefill rows by FlashInfer (arXiv:2501.01005; flashinfer-python 0.6), or by torch where that is missing.

The host knows the rows' lengths, and plans their work. FlashInfer's plans lie in a ring of buffers, which are copied to
the device without waiting; its kernels are compiled when they are first used, and cached on disk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812

from raypp.ops.attention import AttentionBatch, Heads
from raypp.ops.kv_cache import FP8, movable

PREFILL_HEAD_DIMS = (64, 128, 256)
_WORKSPACE_BYTES = 128 << 20  # what FlashInfer recommends
_LAYOUT = "HND"  # heads before tokens in a block, see raypp.ops.kv_cache


class Prefill(Protocol):
    """Attention of prefill rows."""

    def plan(self, batch: AttentionBatch, ring_entry: int) -> object:
        """Return the plan of the batch's prefill rows."""

    def run(self, plan: object, q: torch.Tensor, kv_cache: torch.Tensor, heads: Heads, out: torch.Tensor) -> None:
        """Write the output to `out`; see `FlashInferPrefill`."""


def missing_for_flashinfer(head_dim: int) -> str | None:
    """Return why FlashInfer cannot serve these heads, None if it can."""
    if find_spec("flashinfer") is None:
        return "flashinfer-python is not installed (pip install 'raypp[gpu]')"
    if head_dim not in PREFILL_HEAD_DIMS:
        return f"FlashInfer has no prefill kernel for head_dim={head_dim}, only for {PREFILL_HEAD_DIMS}"
    return None


class FlashInferPrefill:
    """Attention of prefill rows, planned on the host: a break point of graphs.

    A plan is written to pinned memory and copied from there by the device. Planning anew in the same entry waits for
    that copy; steps take entries in turn, and find it done.

    Args:
        heads: Of all layers.
        block_size: Of the KV cache.
        dtype: Of queries.
        kv_dtype: Of the cache. FlashInfer multiplies keys in 8 bits with queries in 16 by its older kernels.
        num_ring_entries: Plans that may be waiting for the device at a time.
        device: Where tensors are.
    """

    def __init__(
        self,
        heads: Heads,
        block_size: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        num_ring_entries: int,
        device: torch.device,
    ) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self._heads = heads
        self._block_size = block_size
        self._dtype = dtype
        self._kv_dtype = kv_dtype
        # One stream runs all steps, so they share the space for partial results; plans lie each in its own.
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers = [
            BatchPrefillWithPagedKVCacheWrapper(workspace, _LAYOUT, backend="auto") for _ in range(num_ring_entries)
        ]
        self._copied = [torch.cuda.Event() for _ in range(num_ring_entries)]

    def plan(self, batch: AttentionBatch, ring_entry: int) -> object:
        """Return the plan of the batch's prefill rows, for `run`. Waits only for the copy of the entry's last plan."""
        heads, block_size = self._heads, self._block_size
        num_blocks = [math.ceil(seq_len / block_size) for seq_len in batch.prefill_seq_lens]
        tables = batch.block_tables[batch.num_decode_rows :]
        wrapper, copied = self._wrappers[ring_entry], self._copied[ring_entry]
        copied.synchronize()
        wrapper.plan(
            _prefix_sums(batch.prefill_query_lens),
            _prefix_sums(num_blocks),
            torch.cat([table[:count] for table, count in zip(tables.unbind(0), num_blocks, strict=False)]),
            _on_host([(n - 1) % block_size + 1 for n in batch.prefill_seq_lens]),
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_dim,
            block_size,
            causal=True,
            sm_scale=heads.scale,
            q_data_type=self._dtype,
            kv_data_type=self._kv_dtype,
            seq_lens=_on_host(batch.prefill_seq_lens),
            max_token_per_sequence=max(batch.prefill_query_lens),
        )
        copied.record()
        return wrapper

    def run(self, plan: object, q: torch.Tensor, kv_cache: torch.Tensor, heads: Heads, out: torch.Tensor) -> None:
        """Write the attention's output to `out`.

        Shapes: q, out [T, Hq, D], the tokens of the planned rows; kv_cache [2, num_blocks, Hk, block_size, D], this
        step's tokens included. `heads` has the layer's scales.
        """
        scales = {"k_scale": heads.k_scale, "v_scale": heads.v_scale} if kv_cache.dtype == FP8 else {}
        plan.run(q, (kv_cache[0], kv_cache[1]), out=out, **scales)  # type: ignore[attr-defined]


@dataclass(frozen=True, eq=False, slots=True)
class SdpaRow:
    """One prefill row: its tokens [start, end) of the queries, its blocks, and what each token sees."""

    start: int
    end: int
    seq_len: int
    blocks: torch.Tensor  # [blocks] int64
    mask: torch.Tensor  # [query_len, seq_len] bool


class SdpaPrefill:
    """Attention of prefill rows by torch alone, row by row; see `FlashInferPrefill`, whose interface this has."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def plan(self, batch: AttentionBatch, ring_entry: int) -> object:
        """Return the plan of the batch's prefill rows, for `run`."""
        rows, start, block_size = [], 0, self._block_size
        tables = batch.block_tables[batch.num_decode_rows :]
        for table, query_len, seq_len in zip(
            tables.unbind(0), batch.prefill_query_lens, batch.prefill_seq_lens, strict=False
        ):
            positions = torch.arange(seq_len, device=table.device)
            mask = positions <= positions[seq_len - query_len :].unsqueeze(1)
            rows.append(SdpaRow(start, start + query_len, seq_len, table[: -(-seq_len // block_size)].long(), mask))
            start += query_len
        return rows

    def run(self, plan: object, q: torch.Tensor, kv_cache: torch.Tensor, heads: Heads, out: torch.Tensor) -> None:
        """Write the attention's output to `out`. Shapes: see `FlashInferPrefill.run`."""
        assert isinstance(plan, list)
        k_scale, v_scale = (heads.k_scale, heads.v_scale) if kv_cache.dtype == FP8 else (1.0, 1.0)
        for row in plan:
            keys, values = (
                side.index_select(0, row.blocks).view(kv_cache.dtype).to(q.dtype).transpose(0, 1).flatten(1, 2)
                for side in movable(kv_cache)
            )
            attended = F.scaled_dot_product_attention(
                q[row.start : row.end].transpose(0, 1).unsqueeze(0),
                keys[:, : row.seq_len].unsqueeze(0),
                values[:, : row.seq_len].unsqueeze(0),
                attn_mask=row.mask,
                scale=heads.scale * k_scale,
                enable_gqa=heads.num_heads != heads.num_kv_heads,
            )
            out[row.start : row.end] = attended.squeeze(0).transpose(0, 1) * v_scale


def _prefix_sums(counts: list[int]) -> torch.Tensor:
    sums = [0]
    for count in counts:
        sums.append(sums[-1] + count)
    return _on_host(sums)


def _on_host(values: list[int]) -> torch.Tensor:
    """Return values that can be copied to the device without waiting, int32."""
    return torch.tensor(values, dtype=torch.int32, pin_memory=True)

"""Attention of prefill rows by FlashInfer (arXiv:2501.01005; flashinfer-python 0.6), or by torch where that is missing.

The host knows the rows' lengths, and plans their work. FlashInfer's plans lie in a ring of buffers, which are copied to
the device without waiting; its kernels are compiled when they are first used, and cached on disk.

Hopper's kernels (FlashAttention-3, arXiv:2407.08608) read keys and values by the tensor memory accelerator where these
lie one after the other; blocks of a cache are gathered by threads, which takes longer. So long chunks attend to a copy
of their rows' keys and values, made once a layer, also in 16 bits where the cache has 8.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec
from operator import mul
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812

from raypp.errors import install
from raypp.ops.attention import AttentionBatch, Heads
from raypp.ops.cuda.heads import gather_heads
from raypp.ops.cuda.kernel_launch import Device
from raypp.ops.kv_cache import FP8, movable

PREFILL_HEAD_DIMS = (64, 128, 256)
_WORKSPACE_BYTES = 128 << 20  # what FlashInfer recommends
_LAYOUT = "HND"  # heads before tokens in a block, see raypp.ops.kv_cache
_COPY_BYTES = 128 << 20  # of keys and values that lie one after the other, of all rows of a step
LEAST_QUERIES_OF_COPIES = {torch.bfloat16: 512, torch.float16: 512, FP8: 128}
"""Queries per key, in the mean, from which a copy pays, by the cache's type: it costs as much for any number."""
_HAS_COPIES = (9, 0)  # compute capability with FlashAttention-3


class Prefill(Protocol):
    """Attention of prefill rows."""

    def plan(self, batch: AttentionBatch, ring_entry: int) -> object:
        """Return the plan of the batch's prefill rows."""

    def run(self, plan: object, q: torch.Tensor, kv_cache: torch.Tensor, heads: Heads, out: torch.Tensor) -> None:
        """Write the output to `out`; see `FlashInferPrefill`."""


def missing_for_flashinfer(head_dim: int) -> str | None:
    """Return why FlashInfer cannot serve these heads, None if it can."""
    if find_spec("flashinfer") is None:
        return f"flashinfer-python is not installed ({install('gpu')})"
    if head_dim not in PREFILL_HEAD_DIMS:
        return f"FlashInfer has no prefill kernel for head_dim={head_dim}, only for {PREFILL_HEAD_DIMS}"
    return None


@dataclass(frozen=True, eq=False, slots=True)
class CopyPlan:
    """A plan over copied keys and values: FlashInfer's, and what is copied."""

    ragged: Any  # a planned BatchPrefillWithRaggedKVCacheWrapper
    tables: torch.Tensor  # [rows, blocks] int32
    starts: torch.Tensor  # [rows + 1] int32: where each row's tokens lie in the copy
    num_tokens: int  # of the copy
    most_blocks: int  # of a row


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
        least_queries: See `LEAST_QUERIES_OF_COPIES`, which it replaces.
    """

    def __init__(
        self,
        heads: Heads,
        block_size: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        num_ring_entries: int,
        device: torch.device,
        least_queries: float | None = None,
    ) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper

        self._heads = heads
        self._block_size = block_size
        self._dtype = dtype
        self._kv_dtype = kv_dtype
        self._device = Device.of(device)
        # One stream runs all steps, so they share the space for partial results; plans lie each in its own.
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        entries = range(num_ring_entries)
        self._wrappers = [BatchPrefillWithPagedKVCacheWrapper(workspace, _LAYOUT, backend="auto") for _ in entries]
        self._ragged: list[Any] = []
        self._copy = torch.empty(2, 0, heads.num_kv_heads, heads.head_dim, dtype=dtype, device=device)
        self._least_queries = LEAST_QUERIES_OF_COPIES[kv_dtype] if least_queries is None else least_queries
        if torch.cuda.get_device_capability(device) == _HAS_COPIES:
            num_tokens = _COPY_BYTES // (2 * heads.num_kv_heads * heads.head_dim * dtype.itemsize)
            self._copy = self._copy.new_empty(2, num_tokens, heads.num_kv_heads, heads.head_dim)
            self._ragged = [BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="fa3") for _ in entries]
        self._copied = [torch.cuda.Event() for _ in entries]

    def plan(self, batch: AttentionBatch, ring_entry: int) -> object:
        """Return the plan of the batch's prefill rows, for `run`. Waits only for the copy of the entry's last plan."""
        copied = self._copied[ring_entry]
        copied.synchronize()
        plan = self._plan_copies if self._is_copied(batch) else self._plan_blocks
        planned = plan(batch, ring_entry)
        copied.record()
        return planned

    def run(self, plan: object, q: torch.Tensor, kv_cache: torch.Tensor, heads: Heads, out: torch.Tensor) -> None:
        """Write the attention's output to `out`.

        Shapes: q, out [T, Hq, D], the tokens of the planned rows; kv_cache [2, num_blocks, Hk, block_size, D], this
        step's tokens included. `heads` has the layer's scales.
        """
        if isinstance(plan, CopyPlan):
            keys, values = self._copy[:, : plan.num_tokens]
            gather_heads(kv_cache, plan.tables, plan.starts, plan.most_blocks, heads, keys, values, self._device)
            plan.ragged.run(q, keys, values, out=out)
        else:
            scales = {"k_scale": heads.k_scale, "v_scale": heads.v_scale} if kv_cache.dtype == FP8 else {}
            plan.run(q, (kv_cache[0], kv_cache[1]), out=out, **scales)  # type: ignore[attr-defined]

    def _is_copied(self, batch: AttentionBatch) -> bool:
        """Whether copies of keys and values have room, and pay."""
        num_keys = sum(batch.prefill_seq_lens)
        num_pairs = sum(map(mul, batch.prefill_query_lens, batch.prefill_seq_lens))
        return num_keys <= self._copy.shape[1] and num_pairs >= self._least_queries * num_keys

    def _plan_copies(self, batch: AttentionBatch, ring_entry: int) -> CopyPlan:
        heads, ragged, starts = self._heads, self._ragged[ring_entry], _prefix_sums(batch.prefill_seq_lens)
        ragged.plan(
            _prefix_sums(batch.prefill_query_lens),
            starts,
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_dim,
            causal=True,
            sm_scale=heads.scale,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )
        tables = batch.block_tables[batch.num_decode_rows :]
        most_blocks = math.ceil(max(batch.prefill_seq_lens) / self._block_size)
        starts_there = starts.to(self._device.torch_device, non_blocking=True)
        return CopyPlan(ragged, tables, starts_there, sum(batch.prefill_seq_lens), most_blocks)

    def _plan_blocks(self, batch: AttentionBatch, ring_entry: int) -> object:
        heads, block_size, wrapper = self._heads, self._block_size, self._wrappers[ring_entry]
        num_blocks = [math.ceil(seq_len / block_size) for seq_len in batch.prefill_seq_lens]
        tables = batch.block_tables[batch.num_decode_rows :]
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
        return wrapper


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

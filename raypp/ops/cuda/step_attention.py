"""Attention on a GPU: append to the cache, then decode rows by one kernel and prefill rows by another.

all tokens      norm, rotation, KV append                       one Triton launch
decode rows     Triton, split along the context                 lengths on the device, capturable
prefill rows    FlashInfer's planned prefill, else torch        lengths from the host: a break point of graphs
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from importlib.util import find_spec
from operator import mul
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812

from raypp.errors import install
from raypp.ops.attention import AttentionBatch, Heads, Rotation
from raypp.ops.break_point import break_point
from raypp.ops.cuda.decode_attention import TritonDecode
from raypp.ops.cuda.heads import append_heads, gather_heads
from raypp.ops.cuda.kernel_launch import Device, Workspace
from raypp.ops.kv_cache import FP8, LayerCache, movable

MAX_FUSED_TOKENS = 16
"""Up to so many tokens of decode rows, the attention kernel makes the heads itself, once per split and KV head."""

PREFILL_HEAD_DIMS = (64, 128, 256)
_WORKSPACE_BYTES = 128 << 20  # what FlashInfer recommends
_LAYOUT = "HND"  # heads before tokens in a block, see raypp.ops.kv_cache
_COPY_BYTES = 128 << 20  # of keys and values that lie one after the other, of all rows of a step
LEAST_QUERIES_OF_COPIES = {torch.bfloat16: 512, torch.float16: 512, FP8: 128}
"""Queries per key, in the mean, from which a copy pays, by the cache's type: it costs as much for any number."""
_HAS_COPIES = (9, 0)  # compute capability with FlashAttention-3
_LOG = logging.getLogger(__name__)


class Prefill(Protocol):
    """Attention of prefill rows."""

    def plan(self, batch: AttentionBatch, ring_entry: int) -> object:
        """Return the plan of the batch's prefill rows."""

    def run(self, plan: object, q: torch.Tensor, cache: LayerCache, heads: Heads, out: torch.Tensor) -> None:
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
    """Attention of prefill rows by FlashInfer (arXiv:2501.01005), planned on the host: a break point of graphs.

    Its kernels are compiled when they are first used, and cached on disk. Hopper's (FlashAttention-3, arXiv:2407.08608)
    read keys and values by the tensor memory accelerator where these lie one after the other; blocks of a cache are
    gathered by threads, which takes longer. So long chunks attend to a copy of their rows' keys and values, made once a
    layer, also in 16 bits where the cache has 8.

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
        num_keys = sum(batch.prefill_seq_lens)
        num_pairs = sum(map(mul, batch.prefill_query_lens, batch.prefill_seq_lens))
        has_room_and_pays = num_keys <= self._copy.shape[1] and num_pairs >= self._least_queries * num_keys
        planned = (self._plan_copies if has_room_and_pays else self._plan_blocks)(batch, ring_entry)
        copied.record()
        return planned

    def run(self, plan: object, q: torch.Tensor, cache: LayerCache, heads: Heads, out: torch.Tensor) -> None:
        """Write the attention's output to `out`.

        Shapes: q, out [T, Hq, D], the tokens of the planned rows. The cache has this step's tokens; `heads` has the
        layer's scales.
        """
        if isinstance(plan, CopyPlan):
            keys, values = self._copy[:, : plan.num_tokens]
            gather_heads(cache, plan.tables, plan.starts, plan.most_blocks, heads, keys, values, self._device)
            plan.ragged.run(q, keys, values, out=out)
        else:
            scales = {"k_scale": heads.k_scale, "v_scale": heads.v_scale} if cache.keys.dtype == FP8 else {}
            plan.run(q, tuple(cache), out=out, **scales)  # type: ignore[attr-defined]

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
        tables = batch.block_tables[0][batch.num_decode_rows :]
        most_blocks = math.ceil(max(batch.prefill_seq_lens) / self._block_size)
        starts_there = starts.to(self._device.torch_device, non_blocking=True)
        return CopyPlan(ragged, tables, starts_there, sum(batch.prefill_seq_lens), most_blocks)

    def _plan_blocks(self, batch: AttentionBatch, ring_entry: int) -> object:
        heads, block_size, wrapper = self._heads, self._block_size, self._wrappers[ring_entry]
        num_blocks = [math.ceil(seq_len / block_size) for seq_len in batch.prefill_seq_lens]
        tables = batch.block_tables[0][batch.num_decode_rows :]
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
        rows, start, block_size = [], 0, self._block_size
        tables = batch.block_tables[0][batch.num_decode_rows :]
        for table, query_len, seq_len in zip(
            tables.unbind(0), batch.prefill_query_lens, batch.prefill_seq_lens, strict=False
        ):
            positions = torch.arange(seq_len, device=table.device)
            mask = positions <= positions[seq_len - query_len :].unsqueeze(1)
            rows.append(SdpaRow(start, start + query_len, seq_len, table[: -(-seq_len // block_size)].long(), mask))
            start += query_len
        return rows

    def run(self, plan: object, q: torch.Tensor, cache: LayerCache, heads: Heads, out: torch.Tensor) -> None:
        assert isinstance(plan, list)
        k_scale, v_scale = (heads.k_scale, heads.v_scale) if cache.keys.dtype == FP8 else (1.0, 1.0)
        for row in plan:
            keys, values = (
                movable(side).index_select(0, row.blocks).view(side.dtype).to(q.dtype).transpose(0, 1).flatten(1, 2)
                for side in cache
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


class CudaAttention:
    """The attention of all layers of a model, which have the same heads but for norms and scales.

    Args:
        heads: Of any layer.
        block_size: Of the KV cache.
        dtype: Of activations.
        kv_dtype: Of the KV cache.
        max_query_len: The most query tokens of a decode row, 1 + K.
        num_ring_entries: Steps that may be planned at a time.
        device: Where it runs.
        workspace: Shared with other kernels.
    """

    def __init__(
        self,
        heads: Heads,
        *,
        block_size: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        max_query_len: int,
        num_ring_entries: int,
        device: Device,
        workspace: Workspace,
    ) -> None:
        self._device = device
        self._kind = heads.kind
        self._decode = TritonDecode(
            heads.num_heads, heads.num_kv_heads, heads.head_dim, max_query_len, device, workspace
        )
        missing = missing_for_flashinfer(heads.head_dim)
        self._prefill: Prefill
        if missing is None:
            self._prefill = FlashInferPrefill(heads, block_size, dtype, kv_dtype, num_ring_entries, device.torch_device)
        else:
            _LOG.warning("prefill attention runs in plain torch, several times slower: %s", missing)
            self._prefill = SdpaPrefill(block_size)

    def plan(self, batch: AttentionBatch, ring_entry: int) -> None:
        """Set the batch's plans: that of its prefill rows."""
        batch.plans = {}
        if batch.prefill_query_lens:
            batch.plans[self._kind] = self._prefill.plan(batch, ring_entry)

    def append(
        self, qkv: torch.Tensor, heads: Heads, rope: Rotation, cache: LayerCache, slot_mapping: torch.Tensor
    ) -> None:
        """Write one layer's keys and values."""
        append_heads(qkv, heads, rope, slot_mapping, cache, self._device)

    def run(
        self,
        qkv: torch.Tensor,
        heads: Heads,
        rope: Rotation,
        cache: LayerCache,
        batch: AttentionBatch,
        out: torch.Tensor | None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Return one layer's output, [T, Hq * D], as `dtype` where there are decode rows alone.

        See `raypp.ops.backend.Attention`.
        """
        num_rows, query_len = batch.num_decode_rows, batch.decode_query_len
        num_decode_tokens = num_rows * query_len
        is_decode_only = num_decode_tokens == len(qkv) and batch.padded_out is None
        if out is None:
            dtype = dtype if dtype is not None and is_decode_only else qkv.dtype
            out = torch.empty(len(qkv), heads.num_heads * heads.head_dim, dtype=dtype, device=qkv.device)
        out_heads = out.view(len(qkv), heads.num_heads, heads.head_dim)
        if num_decode_tokens <= MAX_FUSED_TOKENS and is_decode_only:
            self._decode.from_projection(
                qkv,
                heads,
                rope,
                batch.slot_mappings[0],
                cache,
                batch.seq_lens,
                batch.block_tables[0],
                query_len,
                out_heads,
            )
            return out
        q = append_heads(qkv, heads, rope, batch.slot_mappings[0], cache, self._device)
        attend = self._attend_rows if is_decode_only else self._attend_any_rows
        attend(q, heads, cache, batch, out_heads)
        return out

    @break_point
    def _attend_any_rows(
        self, q: torch.Tensor, heads: Heads, cache: LayerCache, batch: AttentionBatch, out: torch.Tensor
    ) -> None:
        """Attend rows whose number and lengths only the host knows: what is launched depends on them."""
        self._attend_rows(q, heads, cache, batch, out)

    def _attend_rows(
        self, q: torch.Tensor, heads: Heads, cache: LayerCache, batch: AttentionBatch, out: torch.Tensor
    ) -> None:
        """Attend the batch's rows, over a cache that has this step's tokens. Shapes: q, out [T or more, Hq, D]."""
        num_rows, query_len = batch.num_decode_rows, batch.decode_query_len
        num_decode_tokens = num_rows * query_len
        if num_rows:
            self._decode(
                q[:num_decode_tokens],
                cache,
                batch.seq_lens[:num_rows],
                batch.block_tables[0][:num_rows],
                query_len,
                heads,
                out[:num_decode_tokens],
            )
        if batch.prefill_query_lens:
            plan = batch.plans.get(heads.kind)
            assert plan is not None, "prefill rows need plan_attention"
            tokens = slice(num_decode_tokens, batch.num_tokens)
            self._prefill.run(plan, q[tokens], cache, heads, out[tokens])

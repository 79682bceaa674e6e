"""Attention on a GPU: append to the cache, then decode rows by one kernel and prefill rows by another.

all tokens      norm, rotation, KV append                       one Triton launch
decode rows     Triton, split along the context                 lengths on the device, capturable
prefill rows    FlashInfer's planned prefill, else torch        lengths from the host: a break point of graphs
"""

from __future__ import annotations

import logging

import torch

from raypp.ops.attention import AttentionBatch, Heads
from raypp.ops.break_point import break_point
from raypp.ops.cuda.decode_attention import TritonDecode
from raypp.ops.cuda.heads import append_heads
from raypp.ops.cuda.kernel_launch import Device, Workspace
from raypp.ops.cuda.prefill_attention import FlashInferPrefill, Prefill, SdpaPrefill, missing_for_flashinfer
from raypp.ops.rotary import Rotation

MAX_FUSED_TOKENS = 16
"""Up to so many tokens of decode rows, the attention kernel makes the heads itself, once per split and KV head."""

_LOG = logging.getLogger(__name__)


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
        """Set the batch's plan: that of its prefill rows, None without any."""
        batch.plan = self._prefill.plan(batch, ring_entry) if batch.prefill_query_lens else None

    def append(
        self, qkv: torch.Tensor, heads: Heads, by: Rotation, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write one layer's keys and values."""
        append_heads(qkv, heads, by, slot_mapping, kv_cache, self._device)

    def run(
        self,
        qkv: torch.Tensor,
        heads: Heads,
        by: Rotation,
        kv_cache: torch.Tensor,
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
                qkv, heads, by, batch.slot_mapping, kv_cache, batch.seq_lens, batch.block_tables, query_len, out_heads
            )
            return out
        q = append_heads(qkv, heads, by, batch.slot_mapping, kv_cache, self._device)
        attend = self._attend_rows if is_decode_only else self._attend_any_rows
        attend(q, heads, kv_cache, batch, out_heads)
        return out

    @break_point
    def _attend_any_rows(
        self, q: torch.Tensor, heads: Heads, kv_cache: torch.Tensor, batch: AttentionBatch, out: torch.Tensor
    ) -> None:
        """Attend rows whose number and lengths only the host knows: what is launched depends on them."""
        self._attend_rows(q, heads, kv_cache, batch, out)

    def _attend_rows(
        self, q: torch.Tensor, heads: Heads, kv_cache: torch.Tensor, batch: AttentionBatch, out: torch.Tensor
    ) -> None:
        """Attend the batch's rows, over a cache that has this step's tokens. Shapes: q, out [T or more, Hq, D]."""
        num_rows, query_len = batch.num_decode_rows, batch.decode_query_len
        num_decode_tokens = num_rows * query_len
        if num_rows:
            self._decode(
                q[:num_decode_tokens],
                kv_cache,
                batch.seq_lens[:num_rows],
                batch.block_tables[:num_rows],
                query_len,
                heads,
                out[:num_decode_tokens],
            )
        if batch.prefill_query_lens:
            assert batch.plan is not None, "prefill rows need plan_attention"
            tokens = slice(num_decode_tokens, batch.num_tokens)
            self._prefill.run(batch.plan, q[tokens], kv_cache, heads, out[tokens])

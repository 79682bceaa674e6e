"""Attention on a GPU: append to the cache, then decode rows by one kernel and prefill rows by another.

all tokens      norm, rotation, KV append                       one Triton launch
decode rows     Triton (split context) or FlashInfer's XQA      lengths on the device, capturable
prefill rows    FlashInfer's planned prefill, else torch        lengths from the host: a break point of graphs
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

import torch

from raypp.ops.attention import AttentionBatch, Heads
from raypp.ops.backend import DecodeKernel
from raypp.ops.break_point import break_point
from raypp.ops.flashinfer_attention import (
    FlashInferPrefill,
    XqaDecode,
    missing_for_flashinfer,
    missing_for_xqa,
)
from raypp.ops.kernels.decode_attention import TritonDecode
from raypp.ops.kernels.heads import append_heads
from raypp.ops.kernels.launch import Device
from raypp.ops.kernels.workspace import Workspace
from raypp.ops.rotary import Rotation
from raypp.ops.sdpa_prefill import SdpaPrefill

MAX_FUSED_TOKENS = 16
"""Up to so many tokens of decode rows, attention makes its heads itself: they are made once per split and KV head."""

_LOG = logging.getLogger(__name__)


class Decode(Protocol):
    """Attention of decode rows."""

    def __call__(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        seq_lens: torch.Tensor,
        block_tables: torch.Tensor,
        query_len: int,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """Write the output to `out`; see `raypp.ops.kernels.decode_attention.TritonDecode`."""


class Prefill(Protocol):
    """Attention of prefill rows."""

    def plan(self, batch: AttentionBatch, ring_entry: int) -> object:
        """Return the plan of the batch's prefill rows."""

    def run(self, plan: object, q: torch.Tensor, kv_cache: torch.Tensor, out: torch.Tensor) -> None:
        """Write the output to `out`; see `raypp.ops.flashinfer_attention.FlashInferPrefill`."""


@dataclass(eq=False)
class CudaAttentionPlan:
    """What is made ready of a step for all layers: by the host, and by the first layer."""

    num_prefill_tokens: int = 0
    prefill: object = None
    decode_lens: torch.Tensor | None = None  # [R] int32, none past its row's table


class CudaAttention:
    """The attention of all layers of a model, which have the same heads but for their norms.

    Args:
        heads: Of any layer.
        block_size: Of the KV cache.
        dtype: Of activations and cache.
        max_rows: The most decode rows of a step.
        max_query_len: The most query tokens of a decode row, 1 + K.
        num_ring_entries: Steps that may be planned at a time.
        device: Where it runs.
        workspace: Shared with other kernels.
        decode: Which kernel attends decode rows.
    """

    def __init__(
        self,
        heads: Heads,
        *,
        block_size: int,
        dtype: torch.dtype,
        max_rows: int,
        max_query_len: int,
        num_ring_entries: int,
        device: Device,
        workspace: Workspace,
        decode: DecodeKernel = "triton",
    ) -> None:
        self._device = device
        self._block_size = block_size
        torch_device = device.torch_device
        triton_decode = TritonDecode(
            heads.num_heads, heads.num_kv_heads, heads.head_dim, max_query_len, device, workspace
        )
        self._decode: Decode = triton_decode
        self._fused_decode: TritonDecode | None = triton_decode
        if decode == "xqa":
            capability = torch.cuda.get_device_capability(torch_device)
            missing = missing_for_xqa(heads.num_heads, heads.num_kv_heads, block_size, capability)
            if missing is None:
                self._decode, self._fused_decode = XqaDecode(max_rows, max_query_len, torch_device), None
            else:
                _LOG.warning("decode attention runs in Triton: %s", missing)
        missing = missing_for_flashinfer(heads.head_dim)
        self._prefill: Prefill
        if missing is None:
            self._prefill = FlashInferPrefill(heads, block_size, dtype, num_ring_entries, torch_device)
        else:
            _LOG.warning("prefill attention runs in plain torch, several times slower: %s", missing)
            self._prefill = SdpaPrefill(heads, block_size)

    def plan(self, batch: AttentionBatch, ring_entry: int) -> None:
        """Set the batch's plan."""
        prefill = self._prefill.plan(batch, ring_entry) if batch.prefill_query_lens else None
        batch.plan = CudaAttentionPlan(sum(batch.prefill_query_lens), prefill)

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
        """Return one layer's output, [T, Hq * D], as `dtype` where one of own kernels makes all of it.

        See `raypp.ops.backend.Attention`.
        """
        num_rows, query_len = batch.num_decode_rows, batch.decode_query_len
        num_decode_tokens = num_rows * query_len
        is_decode_only = num_decode_tokens == len(qkv) and batch.padded_out is None
        if out is None:
            is_own = is_decode_only and self._fused_decode is not None
            dtype = dtype if dtype is not None and is_own else qkv.dtype
            out = torch.empty(len(qkv), heads.num_heads * heads.head_dim, dtype=dtype, device=qkv.device)
        out_heads = out.view(len(qkv), heads.num_heads, heads.head_dim)
        if self._fused_decode is not None and num_decode_tokens <= MAX_FUSED_TOKENS and is_decode_only:
            self._fused_decode.from_projection(
                qkv, heads, by, batch.slot_mapping, kv_cache, batch.seq_lens, batch.block_tables, query_len, out_heads
            )
            return out
        q = append_heads(qkv, heads, by, batch.slot_mapping, kv_cache, self._device)
        attend = self._attend_rows if is_decode_only else self._attend_any_rows
        attend(q, heads.scale, kv_cache, batch, out_heads)
        return out

    @break_point
    def _attend_any_rows(
        self, q: torch.Tensor, scale: float, kv_cache: torch.Tensor, batch: AttentionBatch, out: torch.Tensor
    ) -> None:
        """Attend rows whose number and lengths are the host's to know: what is launched depends on them."""
        self._attend_rows(q, scale, kv_cache, batch, out)

    def _attend_rows(
        self, q: torch.Tensor, scale: float, kv_cache: torch.Tensor, batch: AttentionBatch, out: torch.Tensor
    ) -> None:
        """Attend the batch's rows, over a cache that has this step's tokens. Shapes: q, out [T or more, Hq, D]."""
        num_rows, query_len = batch.num_decode_rows, batch.decode_query_len
        num_decode_tokens = num_rows * query_len
        plan = batch.plan
        if plan is None:
            assert not batch.prefill_query_lens, "prefill rows need plan_attention"
            plan = batch.plan = CudaAttentionPlan()
        assert isinstance(plan, CudaAttentionPlan)
        if num_rows:
            if plan.decode_lens is None:
                lens, max_len = batch.seq_lens[:num_rows], batch.block_tables.shape[1] * self._block_size
                plan.decode_lens = lens if self._fused_decode is not None else lens.clamp(max=max_len)
            self._decode(
                q[:num_decode_tokens],
                kv_cache,
                plan.decode_lens,
                batch.block_tables[:num_rows],
                query_len,
                scale,
                out[:num_decode_tokens],
            )
        if plan.prefill is not None:
            tokens = slice(num_decode_tokens, num_decode_tokens + plan.num_prefill_tokens)
            self._prefill.run(plan.prefill, q[tokens], kv_cache, out[tokens])

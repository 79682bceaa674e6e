"""Attention over latents on a GPU: append to the cache, then decode rows by one way and prefill rows by another.

    all tokens      norm, rotation, append                      one Triton launch
    decode rows     queries times what expands latents to keys; Triton over the cache; sums times what expands latents
                    to values: the cache is all that is read of the context, once for many heads
    prefill rows    latents of all their tokens, expanded to keys and values of some heads after the others; FlashInfer,
                    else torch: three times fewer operations than over latents. A break point of graphs

Expanded keys and values of as many heads as fit `_EXPANDED_BYTES` are there at a time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from raypp.ops.attention import AttentionBatch, LatentHeads, Rotation
from raypp.ops.break_point import break_point
from raypp.ops.cuda.heads import gather_heads
from raypp.ops.cuda.kernel_launch import Device, Workspace
from raypp.ops.cuda.latent_kernels import TritonLatents
from raypp.ops.cuda.step_attention import PrefillSpace, has_flashinfer, prefix_sums
from raypp.ops.kv_cache import LayerCache
from raypp.ops.row_attention import RowPiece, piece_mask

EXPANDED_SIZES = ((64, 64), (128, 128), (192, 128), (256, 256))
"""Of heads of keys and of values, for which FlashInfer has kernels."""
_EXPANDED_BYTES = 128 << 20
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, slots=True)
class ExpandedPlan:
    """The prefill rows of a step, and how many heads are expanded at once."""

    tables: torch.Tensor  # [rows, blocks] int32
    starts: torch.Tensor  # [rows + 1] int32: where each row's latents begin, on the device
    query_lens: list[int]
    seq_lens: list[int]
    num_heads: int  # at once, a divisor of all
    wrapper: Any  # FlashInfer's, planned; None: by torch
    masks: Sequence[torch.Tensor | None]  # by row, where there is none


class CudaLatentAttention:
    """The attention of all layers whose latents and heads are alike but for their weights and scales.

    Args:
        latents: Of any of these layers.
        block_size: Of the KV cache.
        dtype: Of activations.
        max_query_len: The most query tokens of a decode row, 1 + K.
        num_ring_entries: Steps that may be planned at a time.
        device: Where it runs.
        workspace: Shared with other kernels.
        space: Returns what kinds of attention share for prefill; called where FlashInfer has a kernel.
    """

    def __init__(
        self,
        latents: LatentHeads,
        *,
        block_size: int,
        dtype: torch.dtype,
        max_query_len: int,
        num_ring_entries: int,
        device: Device,
        workspace: Workspace,
        space: Callable[[], PrefillSpace],
    ) -> None:
        self._kernels = TritonLatents(latents, max_query_len, device, workspace)
        self._kind = latents.heads.kind
        self._latents = latents
        self._block_size = block_size
        self._dtype = dtype
        self._device = device
        self._head_dim = latents.key_dim + latents.rotary_dim
        sizes, self._wrappers = (self._head_dim, latents.value_dim), list[Any]()
        self._copied: list[torch.cuda.Event] = []
        if has_flashinfer() and sizes in EXPANDED_SIZES and latents.heads.window is None:
            from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

            entries, shared = range(num_ring_entries), space()
            backend = "fa3" if shared.has_copies else "auto"
            self._wrappers = [
                BatchPrefillWithRaggedKVCacheWrapper(shared.workspace, "NHD", backend=backend) for _ in entries
            ]
            self._copied = [torch.cuda.Event() for _ in entries]
        else:
            _LOG.warning("prefill attention runs in plain torch, several times slower: no FlashInfer for %s", sizes)

    def plan(self, batch: AttentionBatch, ring_entry: int) -> None:
        """Add the plan of the batch's prefill rows. Waits only for the copy of the entry's last plan."""
        latents, query_lens, seq_lens = self._latents, batch.prefill_query_lens, batch.prefill_seq_lens
        num_all, wrapper, masks = latents.heads.num_heads, None, list[torch.Tensor | None]()
        if self._wrappers:
            self._copied[ring_entry].synchronize()
        token_bytes = sum(seq_lens) * (self._head_dim + latents.value_dim) * self._dtype.itemsize
        most = max(1, _EXPANDED_BYTES // token_bytes)
        num_heads = next(count for count in range(min(num_all, most), 0, -1) if num_all % count == 0)
        starts, tables = prefix_sums(seq_lens), batch.block_tables[latents.heads.group][batch.num_decode_rows :]
        if self._wrappers:
            wrapper = self._wrappers[ring_entry]
            wrapper.plan(
                prefix_sums(query_lens),
                starts,
                num_heads,
                num_heads,
                self._head_dim,
                head_dim_vo=latents.value_dim,
                causal=True,
                sm_scale=latents.heads.scale,
                q_data_type=self._dtype,
                kv_data_type=self._dtype,
            )
        else:
            rows, heads = zip(query_lens, seq_lens, strict=True), latents.heads
            masks = [
                piece_mask(RowPiece(0, queries, 0, length), length - queries, heads, self._dtype, tables.device)
                for queries, length in rows
            ]
        starts_there = starts.to(self._device.torch_device, non_blocking=True)
        if self._wrappers:
            self._copied[ring_entry].record()
        batch.plans[self._kind] = ExpandedPlan(tables, starts_there, query_lens, seq_lens, num_heads, wrapper, masks)

    def run(
        self,
        projected: tuple[torch.Tensor, torch.Tensor],
        latents: LatentHeads,
        rope: Rotation,
        cache: LayerCache,
        batch: AttentionBatch,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return one layer's output, [T, Hq * Dv]; see `raypp.ops.backend.LatentAttention`. Queries are overwritten."""
        queries, num_heads = projected[0].unflatten(1, (latents.heads.num_heads, -1)), latents.heads.num_heads
        is_decode_only = batch.num_decode_rows * batch.decode_query_len == len(queries) and batch.padded_out is None
        if out is None:
            out = queries.new_empty(len(queries), num_heads * latents.value_dim)
        slots = batch.slot_mappings[latents.heads.group]
        self._kernels.append(queries, projected[1], latents, rope, slots, cache)
        attend = self._attend_rows if is_decode_only else self._attend_any_rows
        attend(queries, latents, cache, batch, out.view(len(queries), num_heads, -1))
        return out

    @break_point
    def _attend_any_rows(
        self, queries: torch.Tensor, latents: LatentHeads, cache: LayerCache, batch: AttentionBatch, out: torch.Tensor
    ) -> None:
        """Attend rows whose number and lengths only the host knows: what is launched depends on them."""
        self._attend_rows(queries, latents, cache, batch, out)

    def _attend_rows(
        self, queries: torch.Tensor, latents: LatentHeads, cache: LayerCache, batch: AttentionBatch, out: torch.Tensor
    ) -> None:
        """Attend the batch's rows, over a cache that has this step's tokens.

        Shapes: queries [T or more, Hq, N + R], rotated; out [T or more, Hq, Dv].
        """
        num_rows, query_len, group = batch.num_decode_rows, batch.decode_query_len, latents.heads.group
        num_decode_tokens, key_dim = num_rows * query_len, latents.key_dim
        if num_rows:
            of_rows, out_rows = queries[:num_decode_tokens], out[:num_decode_tokens].transpose(0, 1)
            latent_queries = torch.bmm(of_rows[:, :, :key_dim].transpose(0, 1), latents.expand[:, :key_dim])
            lens, tables = batch.seq_lens[:num_rows], batch.block_tables[group][:num_rows]
            summed = self._kernels.attend(
                latent_queries, of_rows[:, :, key_dim:], cache, lens, tables, query_len, latents
            )
            torch.bmm(summed, latents.expand[:, key_dim:].transpose(1, 2), out=out_rows)
        if batch.prefill_query_lens:
            plan = batch.plans.get(self._kind)
            assert isinstance(plan, ExpandedPlan), "prefill rows need plan_attention"
            tokens = slice(num_decode_tokens, batch.num_tokens)
            self._attend_expanded(plan, queries[tokens], latents, cache, out[tokens])

    def _attend_expanded(
        self, plan: ExpandedPlan, queries: torch.Tensor, latents: LatentHeads, cache: LayerCache, out: torch.Tensor
    ) -> None:
        """Write the output of prefill rows. Shapes: queries [T, Hq, N + R]; out [T, Hq, Dv]."""
        num_tokens, num_heads, key_dim = sum(plan.seq_lens), plan.num_heads, latents.key_dim
        latent = queries.new_empty(num_tokens, 1, latents.rank)
        ends = queries.new_empty(num_tokens, 1, latents.rotary_dim)
        most_blocks = math.ceil(max(plan.seq_lens) / self._block_size)
        gather_heads(cache, plan.tables, plan.starts, most_blocks, latents.heads, ends, latent, self._device)
        keys = queries.new_empty(num_tokens, num_heads, self._head_dim)
        values = queries.new_empty(num_tokens, num_heads, latents.value_dim)
        keys[:, :, key_dim:] = ends  # the same of all heads
        of_heads = latent.squeeze(1).expand(num_heads, -1, -1)
        for first in range(0, latents.heads.num_heads, num_heads):
            heads = slice(first, first + num_heads)
            expand = latents.expand[heads].transpose(1, 2)
            torch.bmm(of_heads, expand[:, :, :key_dim], out=keys[:, :, :key_dim].transpose(0, 1))
            torch.bmm(of_heads, expand[:, :, key_dim:], out=values.transpose(0, 1))
            out[:, heads] = self._attend_heads(plan, queries[:, heads], keys, values)

    def _attend_heads(
        self, plan: ExpandedPlan, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Return the output of some heads of prefill rows, [T, heads, Dv]."""
        out = queries.new_empty(*queries.shape[:2], values.shape[2])
        if plan.wrapper is not None:
            plan.wrapper.run(queries.contiguous(), keys, values, out=out)
            return out
        first_query = first_key = 0
        for num_queries, num_keys, mask in zip(plan.query_lens, plan.seq_lens, plan.masks, strict=True):
            rows, tokens = slice(first_query, first_query + num_queries), slice(first_key, first_key + num_keys)
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (queries[rows], keys[tokens], values[tokens]))
            scale = self._latents.heads.scale
            attended = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale)
            out[rows] = attended.squeeze(0).transpose(0, 1)
            first_query, first_key = first_query + num_queries, first_key + num_keys
        return out


class LatentLayerAttention:
    """One layer's view of the attention that layers of its kind share. See `raypp.ops.backend.LatentAttention`."""

    def __init__(self, attention: CudaLatentAttention, latents: LatentHeads) -> None:
        self._attention = attention
        self._latents = latents

    def __call__(
        self,
        projected: tuple[torch.Tensor, torch.Tensor],
        rope: Rotation,
        cache: LayerCache,
        batch: AttentionBatch,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._attention.run(projected, self._latents, rope, cache, batch, out)

"""Attention over latents on a GPU: append to the cache, then decode rows by one way and prefill rows by another.

    all tokens      norm, rotation, append                      one Triton launch
    decode rows     queries times what expands latents to keys; Triton over the cache; sums times what expands latents
                    to values: the cache is all that is read of the context, once for many heads
    prefill rows    latents of all their tokens, expanded to keys and values of some heads after the others; FlashInfer,
                    else torch: three times fewer operations than over latents. A break point of graphs

What is expanded at a time takes at most `EXPANDED_BYTES`: rows follow each other in groups, and heads of a group, as
many as fit. A row alone has at least one head at a time, see `expanded_bytes`.
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
from raypp.ops.state_sizes import EXPANDED_BYTES

EXPANDED_SIZES = ((64, 64), (128, 128), (192, 128), (256, 256))
"""Of heads of keys and of values, for which FlashInfer has kernels."""
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, slots=True)
class ExpandedPlan:
    """Prefill rows of a step whose contexts are expanded together, and how many heads are at once."""

    tables: torch.Tensor  # [rows, blocks] int32
    starts: torch.Tensor  # [rows + 1] int32: where each row's latents begin, on the device
    query_lens: list[int]
    seq_lens: list[int]
    num_heads: int  # at once, a divisor of all
    wrapper: Any  # FlashInfer's, planned; None: by torch
    masks: Sequence[torch.Tensor | None]  # by row, where there is none


def row_groups(seq_lens: Sequence[int], token_bytes: int) -> list[slice]:
    """Return rows that follow each other and are expanded together: as many as fit `EXPANDED_BYTES`, at least one.

    Args:
        seq_lens: Tokens of each row's context.
        token_bytes: What a token takes with one head at a time.
    """
    groups, first, num_tokens = list[slice](), 0, 0
    for row, length in enumerate(seq_lens):
        if row > first and (num_tokens + length) * token_bytes > EXPANDED_BYTES:
            groups.append(slice(first, row))
            first, num_tokens = row, 0
        num_tokens += length
    return [*groups, slice(first, len(seq_lens))] if seq_lens else groups


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
        sizes, self._space = (self._head_dim, latents.value_dim), None
        self._wrappers: list[list[Any]] = []  # by ring entry, one for each group of rows that there has been
        self._copied: list[torch.cuda.Event] = []
        if has_flashinfer() and sizes in EXPANDED_SIZES and latents.heads.window is None:
            entries, self._space = range(num_ring_entries), space()
            self._wrappers = [[self._wrapper()] for _ in entries]
            self._copied = [torch.cuda.Event() for _ in entries]
        else:
            _LOG.warning("prefill attention runs in plain torch, several times slower: no FlashInfer for %s", sizes)

    def plan(self, batch: AttentionBatch, ring_entry: int) -> None:
        """Add the plan of the batch's prefill rows. Waits only for the copy of the entry's last plan."""
        if self._wrappers:
            self._copied[ring_entry].synchronize()
        groups = row_groups(batch.prefill_seq_lens, self._token_bytes(1))
        batch.plans[self._kind] = [self._plan(batch, rows, ring_entry, index) for index, rows in enumerate(groups)]
        if self._wrappers:
            self._copied[ring_entry].record()

    def _token_bytes(self, num_heads: int) -> int:
        """Return what a token of the context takes: its latent, and keys and values of some heads."""
        latents = self._latents
        expanded = num_heads * (self._head_dim + latents.value_dim)
        return (latents.rank + latents.rotary_dim + expanded) * self._dtype.itemsize

    def _plan(self, batch: AttentionBatch, rows: slice, ring_entry: int, index: int) -> ExpandedPlan:
        latents, query_lens, seq_lens = self._latents, batch.prefill_query_lens[rows], batch.prefill_seq_lens[rows]
        num_all, wrapper, masks = latents.heads.num_heads, None, list[torch.Tensor | None]()
        fits = (n for n in range(num_all, 0, -1) if num_all % n == 0)
        num_heads = next((n for n in fits if sum(seq_lens) * self._token_bytes(n) <= EXPANDED_BYTES), 1)
        starts = prefix_sums(seq_lens)
        tables = batch.block_tables[latents.heads.group][batch.num_decode_rows :][rows]
        if self._wrappers:
            wrappers = self._wrappers[ring_entry]
            if index == len(wrappers):
                wrappers.append(self._wrapper())
            wrapper = wrappers[index]
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
            masks = [
                piece_mask(RowPiece(0, queries, 0), length - queries, latents.heads, self._dtype, tables.device)
                for queries, length in zip(query_lens, seq_lens, strict=True)
            ]
        starts_there = starts.to(self._device.torch_device, non_blocking=True)
        return ExpandedPlan(tables, starts_there, query_lens, seq_lens, num_heads, wrapper, masks)

    def _wrapper(self) -> Any:
        from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

        assert self._space is not None
        backend = "fa3" if self._space.has_copies else "auto"
        return BatchPrefillWithRaggedKVCacheWrapper(self._space.workspace, "NHD", backend=backend)

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
            plans, first = batch.plans.get(self._kind), num_decode_tokens
            assert isinstance(plans, list), "prefill rows need plan_attention"
            for plan in plans:
                tokens = slice(first, first + sum(plan.query_lens))
                self._attend_expanded(plan, queries[tokens], latents, cache, out[tokens])
                first = tokens.stop

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

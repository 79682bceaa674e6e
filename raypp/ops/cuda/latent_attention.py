"""Attention over latents on a GPU: append to the cache, then decode rows by one way and prefill rows by another.

    all tokens      norm, rotation, append                      one Triton launch
    decode rows     queries times what expands latents to keys; Triton over the cache; sums times what expands latents
                    to values: the cache is all that is read of the context, once for many heads
    prefill rows    latents of all their tokens, expanded to keys and values of some heads after the others; FlashInfer,
                    else torch: three times fewer operations than over latents. A break point of graphs

Rows are expanded in groups, some heads at a time: see `raypp.ops.expanded_rows`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from raypp.ops.attention import AttentionBatch, Heads, LatentHeads, Rotation
from raypp.ops.break_point import break_point
from raypp.ops.cuda.heads import gather_heads
from raypp.ops.cuda.kernel_launch import Device, Workspace
from raypp.ops.cuda.latent_kernels import TritonLatents
from raypp.ops.cuda.step_attention import PrefillSpace, has_flashinfer, prefix_sums
from raypp.ops.expanded_rows import EXPANDED_BYTES, MOST_GROUPS, LatentSizes, group_rows
from raypp.ops.kv_cache import LayerCache
from raypp.ops.row_attention import attend_piece, piece_mask, row_pieces

EXPANDED_SIZES = ((64, 64), (128, 128), (192, 128), (256, 256))
"""Of heads of keys and of values, for which FlashInfer has kernels."""
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, slots=True)
class ExpandedGroup:
    """Prefill rows of a step that are expanded together."""

    tables: torch.Tensor  # [rows, blocks] int32
    starts: torch.Tensor  # [rows + 1] int32: where each row's latents begin, on the device
    query_lens: list[int]
    seq_lens: list[int]
    num_heads: int  # at once, a divisor of all
    wrapper: Any  # FlashInfer's, planned; None: by torch


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
        token_bytes = latents.heads.head_dim, self._head_dim + latents.value_dim
        self._sizes = LatentSizes(*(width * dtype.itemsize for width in token_bytes))
        self._room = torch.empty(EXPANDED_BYTES, dtype=torch.uint8, device=device.torch_device)
        sizes, self._wrappers = (self._head_dim, latents.value_dim), list[Any]()
        self._num_entries = num_ring_entries
        self._copied: list[torch.cuda.Event] = []
        if has_flashinfer() and sizes in EXPANDED_SIZES and latents.heads.window is None:
            from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

            shared = space()
            count, backend = num_ring_entries + MOST_GROUPS - 1, "fa3" if shared.has_copies else "auto"
            self._wrappers = [
                BatchPrefillWithRaggedKVCacheWrapper(shared.workspace, "NHD", backend=backend) for _ in range(count)
            ]
            self._copied = [torch.cuda.Event() for _ in range(count)]
        else:
            _LOG.warning("prefill attention runs in plain torch, several times slower: no FlashInfer for %s", sizes)

    def plan(self, batch: AttentionBatch, ring_entry: int) -> None:
        """Add the plan of the batch's prefill rows, group by group.

        The first group has the entry's wrapper. The others share some with other steps, which have been launched, and
        wait for the copies of their last plans.
        """
        query_lens, seq_lens = batch.prefill_query_lens, batch.prefill_seq_lens
        num_heads, runs = group_rows(seq_lens, self._sizes, self._latents.heads.num_heads)
        tables = batch.block_tables[self._latents.heads.group][batch.num_decode_rows :]
        needed = max(sum(seq_lens[rows]) for rows in runs) * self._sizes.of_token(num_heads)
        if needed > len(self._room):  # a row alone, whose bytes are planned
            self._room = self._room.new_empty(needed)
        groups = list[ExpandedGroup]()
        for index, rows in enumerate(runs):
            wrapper = None
            starts = prefix_sums(seq_lens[rows])
            if self._wrappers and index < MOST_GROUPS:
                which = ring_entry if index == 0 else self._num_entries + index - 1
                wrapper = self._wrappers[which]
                self._copied[which].synchronize()
                self._plan_wrapper(wrapper, prefix_sums(query_lens[rows]), starts, num_heads)
                self._copied[which].record()
            there = starts.to(self._device.torch_device, non_blocking=True)
            groups.append(ExpandedGroup(tables[rows], there, query_lens[rows], seq_lens[rows], num_heads, wrapper))
        batch.plans[self._kind] = groups

    def _plan_wrapper(self, wrapper: Any, query_starts: torch.Tensor, starts: torch.Tensor, num_heads: int) -> None:
        wrapper.plan(
            query_starts,
            starts,
            num_heads,
            num_heads,
            self._head_dim,
            head_dim_vo=self._latents.value_dim,
            causal=True,
            sm_scale=self._latents.heads.scale,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )

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

    def append(
        self,
        projected: tuple[torch.Tensor, torch.Tensor],
        latents: LatentHeads,
        rope: Rotation,
        cache: LayerCache,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write one layer's latents and rotated keys to the cache."""
        none = projected[0].unflatten(1, (latents.heads.num_heads, -1))[:, :0]
        self._kernels.append(none, projected[1], latents, rope, slot_mapping, cache)

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
            groups, start = batch.plans.get(self._kind), num_decode_tokens
            assert isinstance(groups, list), "prefill rows need plan_attention"
            for each in groups:
                tokens = slice(start, start + sum(each.query_lens))
                self._attend_expanded(each, queries[tokens], latents, cache, out[tokens])
                start = tokens.stop

    def _attend_expanded(
        self, group: ExpandedGroup, queries: torch.Tensor, latents: LatentHeads, cache: LayerCache, out: torch.Tensor
    ) -> None:
        """Write the output of a group's rows. Shapes: queries [T, Hq, N + R]; out [T, Hq, Dv]."""
        num_tokens, num_heads, key_dim = sum(group.seq_lens), group.num_heads, latents.key_dim
        widths = (num_heads * self._head_dim, num_heads * latents.value_dim, latents.rank, latents.rotary_dim)
        counts = [num_tokens * width for width in widths]
        room = self._room[: sum(counts) * queries.itemsize].view(queries.dtype).split_with_sizes(counts)
        keys, values = (part.view(num_tokens, num_heads, -1) for part in room[:2])
        latent, ends = (part.view(num_tokens, 1, -1) for part in room[2:])
        most_blocks = math.ceil(max(group.seq_lens) / self._block_size)
        gather_heads(cache, group.tables, group.starts, most_blocks, latents.heads, ends, latent, self._device)
        keys[:, :, key_dim:] = ends  # the same of all heads
        of_heads = latent.squeeze(1).expand(num_heads, -1, -1)
        for first in range(0, latents.heads.num_heads, num_heads):
            heads = slice(first, first + num_heads)
            expand = latents.expand[heads].transpose(1, 2)
            torch.bmm(of_heads, expand[:, :, :key_dim], out=keys[:, :, :key_dim].transpose(0, 1))
            torch.bmm(of_heads, expand[:, :, key_dim:], out=values.transpose(0, 1))
            out[:, heads] = self._attend_heads(group, queries[:, heads], keys, values)

    def _attend_heads(
        self, group: ExpandedGroup, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Return the output of some heads of prefill rows, [T, heads, Dv]."""
        out = queries.new_empty(*queries.shape[:2], values.shape[2])
        if group.wrapper is not None:
            group.wrapper.run(queries.contiguous(), keys, values, out=out)
            return out
        num_heads, of_all, first_query, first_key = group.num_heads, self._latents.heads, 0, 0
        heads = Heads(
            num_heads,
            num_heads,
            self._head_dim,
            v_dim=values.shape[2],
            scale=of_all.scale,
            window=of_all.window,
        )
        for num_queries, num_keys in zip(group.query_lens, group.seq_lens, strict=True):
            before = num_keys - num_queries
            for piece in row_pieces(num_queries, num_keys, heads):
                rows = slice(first_query + piece.begin, first_query + piece.end)
                tokens = slice(first_key + piece.first, first_key + piece.last)
                k, v = keys[tokens].transpose(0, 1), values[tokens].transpose(0, 1)
                mask = piece_mask(piece, before, heads, queries.dtype, queries.device)
                out[rows] = attend_piece(queries[rows], k, v, mask, heads, heads.scale)
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

    def append(
        self,
        projected: tuple[torch.Tensor, torch.Tensor],
        rope: Rotation,
        cache: LayerCache,
        slot_mapping: torch.Tensor,
    ) -> None:
        self._attention.append(projected, self._latents, rope, cache, slot_mapping)

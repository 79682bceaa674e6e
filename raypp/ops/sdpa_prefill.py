"""Attention of prefill rows by torch alone, row by row: where FlashInfer is missing or has no kernel for the heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from raypp.ops.attention import AttentionBatch, Heads


@dataclass(frozen=True, eq=False, slots=True)
class SdpaRow:
    """One prefill row: its tokens [start, end) of the queries, its blocks, and what each token sees."""

    start: int
    end: int
    seq_len: int
    blocks: torch.Tensor  # [blocks] int64
    mask: torch.Tensor  # [query_len, seq_len] bool


class SdpaPrefill:
    """See `raypp.ops.flashinfer_attention.FlashInferPrefill`, whose interface this has."""

    def __init__(self, heads: Heads, block_size: int) -> None:
        self._scale = heads.scale
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

    def run(self, plan: object, q: torch.Tensor, kv_cache: torch.Tensor, out: torch.Tensor) -> None:
        """Write the attention's output to `out`. Shapes: q, out [T, Hq, D]; kv_cache as everywhere."""
        assert isinstance(plan, list)
        for row in plan:
            keys, values = (
                side.index_select(0, row.blocks).transpose(0, 1).flatten(1, 2)[:, : row.seq_len].unsqueeze(0)
                for side in kv_cache
            )
            attended = F.scaled_dot_product_attention(
                q[row.start : row.end].transpose(0, 1).unsqueeze(0),
                keys,
                values,
                attn_mask=row.mask,
                scale=self._scale,
                enable_gqa=q.shape[1] != keys.shape[1],
            )
            out[row.start : row.end] = attended.squeeze(0).transpose(0, 1)

"""A step of nothing but padding: for the first steps of a stage, and for recording."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from raypp.messages import NULL_BLOCK
from raypp.ops.attention import AttentionBatch
from raypp.stage.spec import StageSpec


@dataclass(frozen=True, eq=False)
class PaddingStep:
    """Rows without a prefix, of T tokens together; they write the null block alone."""

    positions: torch.Tensor  # [T] int64
    attention: AttentionBatch


def padding_step(
    spec: StageSpec, num_prefill_tokens: int, *, num_decode_rows: int = 0, decode_query_len: int = 1
) -> PaddingStep:
    """Return a step of some decode rows and `num_prefill_tokens` tokens in as few rows as the model's length allows."""
    device, most = torch.device(spec.device), spec.max_model_len
    prefill_lens = [min(most, num_prefill_tokens - start) for start in range(0, num_prefill_tokens, most)]
    lens = [decode_query_len] * num_decode_rows + prefill_lens
    positions = torch.cat([torch.arange(length, device=device) for length in lens])
    query_start_loc = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32, device=device)
    attention = AttentionBatch(
        num_decode_rows=num_decode_rows,
        decode_query_len=decode_query_len,
        query_start_loc=query_start_loc,
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        block_tables=torch.full((len(lens), spec.blocks_per_row + 1), NULL_BLOCK, dtype=torch.int32, device=device),
        slot_mapping=positions % spec.block_size,
        max_decode_seq_len=decode_query_len if num_decode_rows else 0,
        prefill_query_lens=prefill_lens,
        prefill_seq_lens=prefill_lens,
    )
    return PaddingStep(positions, attention)

"""Makes the inputs of a decode step's layers: positions, KV slots, lengths, block tables. On a GPU in one launch."""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

import torch


class NewEntries(NamedTuple):
    """Entries of the block tables that a step brings, all int64 [E]; where an entry repeats, any may win."""

    rows: torch.Tensor
    positions: torch.Tensor
    block_ids: torch.Tensor


class DecodeInputs(NamedTuple):
    """R rows of Q tokens each."""

    positions: torch.Tensor  # [R * Q] int64
    slot_mapping: torch.Tensor  # [R * Q] int64
    seq_lens: torch.Tensor  # [R] int32, this step's tokens included
    block_tables: torch.Tensor  # [R, W] int32


def decode_inputs(
    tables: torch.Tensor,
    entries: NewEntries,
    rows: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    *,
    query_len: int,
    block_size: int,
    max_len: int,
) -> DecodeInputs:
    """Write new entries into the tables, and return the inputs of the rows. Never waits; a graph can hold it.

    Shapes: tables [max_rows, W] int32, of all rows; rows [R] int64; num_computed_tokens [R] int32. A position past a
    table's end counts as in its last block, a length past `max_len` as that.
    """
    if tables.is_cuda and find_spec("triton") is not None:
        from raypp.ops.cuda.decode_inputs_kernel import decode_inputs as run

        return DecodeInputs(*run(tables, entries, rows, num_computed_tokens, query_len, block_size, max_len))
    tables.index_put_((entries.rows, entries.positions), entries.block_ids.to(torch.int32))
    block_tables = tables.index_select(0, rows)
    offsets = torch.arange(query_len, device=rows.device)
    positions = num_computed_tokens.to(torch.int64).unsqueeze(1) + offsets
    blocks = block_tables.gather(1, (positions // block_size).clamp_(max=tables.shape[1] - 1))
    slots = blocks.to(torch.int64) * block_size + positions % block_size
    seq_lens = (num_computed_tokens + query_len).clamp_(max=max_len)
    return DecodeInputs(positions.view(-1), slots.view(-1), seq_lens, block_tables)

"""Computes what layers need of a step's rows: positions, KV slots, lengths, block tables. One launch on a GPU."""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

import torch


class NewEntries(NamedTuple):
    """Entries of the block tables that a step brings, all int64 [E]; where an entry repeats, any may win."""

    rows: torch.Tensor  # of the tables seen as [G * max_rows, W]
    positions: torch.Tensor
    block_ids: torch.Tensor


class Queries(NamedTuple):
    """How many tokens each of R rows has in a step, T together."""

    query_start_loc: torch.Tensor  # [R + 1] int32, where each row's tokens begin, then T
    num_tokens: int  # T
    most: int  # of a row


class RowInputs(NamedTuple):
    """R rows with T tokens, and block tables of G groups of layers."""

    positions: torch.Tensor  # [T] int64
    slot_mappings: tuple[torch.Tensor, ...]  # [T] int64 by group
    seq_lens: torch.Tensor  # [R] int32, this step's tokens included
    block_tables: tuple[torch.Tensor, ...]  # [R, W] int32 by group


def row_inputs(
    tables: torch.Tensor,
    entries: NewEntries,
    rows: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    queries: Queries,
    *,
    block_size: int,
    max_len: int,
) -> RowInputs:
    """Write new entries into the tables, and return the inputs of the rows. Waits for nothing; graphs can hold it.

    Shapes: tables [G, max_rows, W] int32, of all rows; rows [R] int64; num_computed_tokens [R] int32. A position past
    a table's end counts as in its last block, a length past `max_len` as that.
    """
    if tables.is_cuda and find_spec("triton") is not None:
        from raypp.ops.cuda.row_inputs_kernel import row_inputs as run

        positions, slots, lens, block_tables = run(
            tables, entries, rows, num_computed_tokens, queries, block_size, max_len
        )
        return RowInputs(positions, slots.unbind(), lens, block_tables.unbind())
    width = tables.shape[2]
    if len(entries.rows):
        tables.view(-1, width).index_put_((entries.rows, entries.positions), entries.block_ids.to(torch.int32))
    block_tables = tables.index_select(1, rows)
    begins, counts = queries.query_start_loc[:-1], queries.query_start_loc.diff()
    numbers = torch.arange(len(rows), device=rows.device)
    of_tokens = torch.repeat_interleave(numbers, counts, output_size=queries.num_tokens)
    offsets = torch.arange(queries.num_tokens, device=rows.device) - begins.index_select(0, of_tokens)
    positions = num_computed_tokens.index_select(0, of_tokens) + offsets
    blocks = block_tables[:, of_tokens, (positions // block_size).clamp_(max=width - 1)]
    slots = blocks.to(torch.int64) * block_size + positions % block_size
    lens = (num_computed_tokens + counts).clamp_(max=max_len)
    return RowInputs(positions, slots.unbind(), lens, block_tables.unbind())

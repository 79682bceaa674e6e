"""Makes the inputs of a decode step in one launch. Twin: the torch half of `raypp.ops.decode_inputs`.

Every program writes all new entries of the block tables before it reads its own row; all write the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from raypp.ops.cuda.launch import Device, start

_TILE = 1024
_MIN_ENTRIES = 128
"""Fewer entries are padded to this number: each power of two would be one more kernel to compile."""
_OF_FEW = ["entry_rows", "entry_positions", "entry_blocks", "rows", "num_computed_tokens", "positions", "slot_mapping"]
"""Arguments of which a program reads a few elements. Their alignment is not worth one more compiled kernel."""


def decode_inputs(
    tables: torch.Tensor,
    entries: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rows: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    query_len: int,
    block_size: int,
    max_len: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return positions, slot_mapping, seq_lens and block_tables; see `raypp.ops.decode_inputs.decode_inputs`."""
    num_rows, width = len(rows), tables.shape[1]
    device = Device.of(tables.device)
    numbers = torch.empty(2, num_rows * query_len, dtype=torch.int64, device=rows.device)
    positions, slot_mapping = numbers
    seq_lens = torch.empty(num_rows, dtype=torch.int32, device=rows.device)
    block_tables = torch.empty(num_rows, width, dtype=torch.int32, device=rows.device)
    if num_rows:
        _decode_inputs[(num_rows,)](
            tables,
            *entries,
            rows,
            num_computed_tokens,
            positions,
            slot_mapping,
            seq_lens,
            block_tables,
            len(entries[0]),
            width,
            max_len,
            QUERY_LEN=query_len,
            TOKENS=triton.next_power_of_2(query_len),
            BLOCK_SIZE=block_size,
            ENTRIES=triton.next_power_of_2(max(_MIN_ENTRIES, len(entries[0]))),
            TILE=min(_TILE, triton.next_power_of_2(width)),
            OVERLAPS=device.has_dependent_launch,
            num_warps=4,
            **device.launch_options,
        )
    return positions, slot_mapping, seq_lens, block_tables


@triton.jit(do_not_specialize=["num_entries", "max_len"], do_not_specialize_on_alignment=_OF_FEW)
def _decode_inputs(
    tables,
    entry_rows,
    entry_positions,
    entry_blocks,
    rows,
    num_computed_tokens,
    positions,
    slot_mapping,
    seq_lens,
    block_tables,
    num_entries,
    width,
    max_len,
    QUERY_LEN: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ENTRIES: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    index = tl.program_id(0)
    start(OVERLAPS)
    entry = tl.arange(0, ENTRIES)
    is_entry = entry < num_entries
    entry_row = tl.load(entry_rows + entry, mask=is_entry, other=0)
    entry_position = tl.load(entry_positions + entry, mask=is_entry, other=0)
    block_id = tl.load(entry_blocks + entry, mask=is_entry, other=0)
    tl.store(tables + entry_row * width + entry_position, block_id.to(tl.int32), mask=is_entry)
    tl.debug_barrier()  # what this program wrote it reads again
    table = tables + tl.load(rows + index) * width
    for begin in range(0, width, TILE):
        column = begin + tl.arange(0, TILE)
        inside = column < width
        blocks = tl.load(table + column, mask=inside, other=0, cache_modifier=".cg")
        tl.store(block_tables + index.to(tl.int64) * width + column, blocks, mask=inside)
    token = tl.arange(0, TOKENS)
    is_token = token < QUERY_LEN
    computed = tl.load(num_computed_tokens + index)
    position = computed + token
    blocks = tl.load(
        table + tl.minimum(position // BLOCK_SIZE, width - 1), mask=is_token, other=0, cache_modifier=".cg"
    )
    slot = blocks.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(positions + index * QUERY_LEN + token, position.to(tl.int64), mask=is_token)
    tl.store(slot_mapping + index * QUERY_LEN + token, slot, mask=is_token)
    tl.store(seq_lens + index, tl.minimum(computed + QUERY_LEN, max_len))

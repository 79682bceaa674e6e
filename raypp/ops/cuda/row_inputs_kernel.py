"""The inputs of a step's rows in one launch. Twin: the torch half of `raypp.ops.row_inputs`.

Every program writes all new entries of the block tables before it reads its own row; all write the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from raypp.ops.cuda.kernel_launch import Device, start

_TILE = 1024
_ENTRIES = 128  # that are written at a time: as many as a program has threads
_FEW_TOKENS = 32
_MANY_TOKENS = 512
"""The tokens of a row that are computed at a time: few where all rows decode, many where some have prompts."""
_OF_FEW = ["entry_rows", "entry_positions", "entry_blocks", "rows", "num_computed_tokens", "query_start_loc"]
_OF_FEW += ["positions", "slot_mappings"]
"""Arguments of which a program touches a few elements: where they begin is not worth a kernel of its own."""


def row_inputs(
    tables: torch.Tensor,
    entries: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rows: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    queries: tuple[torch.Tensor, int, int],
    block_size: int,
    max_len: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return positions [T], slots [G, T], lengths [R] and tables [G, R, W]; see `raypp.ops.row_inputs.row_inputs`."""
    query_start_loc, num_tokens, most = queries
    num_rows, (num_groups, max_rows, width) = len(rows), tables.shape
    device = Device.of(tables.device)
    numbers = torch.empty(1 + num_groups, num_tokens, dtype=torch.int64, device=rows.device)
    positions, slot_mappings = numbers[0], numbers[1:]
    seq_lens = torch.empty(num_rows, dtype=torch.int32, device=rows.device)
    block_tables = torch.empty(num_groups, num_rows, width, dtype=torch.int32, device=rows.device)
    if num_rows:
        _row_inputs[(num_rows, num_groups)](
            tables,
            *entries,
            rows,
            num_computed_tokens,
            query_start_loc,
            positions,
            slot_mappings,
            seq_lens,
            block_tables,
            len(entries[0]),
            max_rows,
            num_tokens,
            width,
            max_len,
            TOKENS=_FEW_TOKENS if most <= _FEW_TOKENS else _MANY_TOKENS,
            BLOCK_SIZE=block_size,
            ENTRIES=_ENTRIES,
            TILE=min(_TILE, triton.next_power_of_2(width)),
            OVERLAPS=device.has_dependent_launch,
            num_warps=4,
            **device.launch_options,
        )
    return positions, slot_mappings, seq_lens, block_tables


@triton.jit(
    do_not_specialize=["num_entries", "max_rows", "num_tokens", "max_len"], do_not_specialize_on_alignment=_OF_FEW
)
def _row_inputs(
    tables,
    entry_rows,
    entry_positions,
    entry_blocks,
    rows,
    num_computed_tokens,
    query_start_loc,
    positions,
    slot_mappings,
    seq_lens,
    block_tables,
    num_entries,
    max_rows,
    num_tokens,
    width,
    max_len,
    TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ENTRIES: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    index, group = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start(OVERLAPS)
    for begin in range(0, num_entries, ENTRIES):
        entry = begin + tl.arange(0, ENTRIES)
        is_entry = entry < num_entries
        entry_row = tl.load(entry_rows + entry, mask=is_entry, other=0)
        entry_position = tl.load(entry_positions + entry, mask=is_entry, other=0)
        block_id = tl.load(entry_blocks + entry, mask=is_entry, other=0)
        tl.store(tables + entry_row * width + entry_position, block_id.to(tl.int32), mask=is_entry)
    tl.debug_barrier()  # what this program wrote it reads again
    table = tables + (group * max_rows + tl.load(rows + index)) * width
    copy = block_tables + (group * tl.num_programs(0) + index) * width
    for begin in range(0, width, TILE):
        column = begin + tl.arange(0, TILE)
        inside = column < width
        blocks = tl.load(table + column, mask=inside, other=0, cache_modifier=".cg")
        tl.store(copy + column, blocks, mask=inside)
    computed = tl.load(num_computed_tokens + index)
    first, end = tl.load(query_start_loc + index), tl.load(query_start_loc + index + 1)
    for begin in range(first, end, TOKENS):
        token = begin + tl.arange(0, TOKENS)
        is_token = token < end
        position = computed + token - first
        blocks = tl.load(
            table + tl.minimum(position // BLOCK_SIZE, width - 1), mask=is_token, other=0, cache_modifier=".cg"
        )
        slot = blocks.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        tl.store(positions + token, position.to(tl.int64), mask=is_token & (group == 0))
        tl.store(slot_mappings + group * num_tokens + token, slot, mask=is_token)
    tl.store(seq_lens + index, tl.minimum(computed + end - first, max_len))

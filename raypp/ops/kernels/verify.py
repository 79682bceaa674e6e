"""Verification of drafts in one launch: compare, count, remember. Twin: `raypp.specdec.draft_tables.DraftTables`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def verify_and_append(
    token_ids: torch.Tensor,
    rows: torch.Tensor,
    first: torch.Tensor,
    draft_ids: torch.Tensor,
    num_proposed: torch.Tensor,
    limits: torch.Tensor,
    tokens: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accept drafts up to the first that is not the model's own token, and write what is valid into the token table.

    Shapes: token_ids [Y, 1 + K] int32, the model's tokens; rows [Y] int64 contiguous; first [Y] int64, the position of
    each row's first token, with any stride; tables by row: draft_ids [num_rows, K_max], num_proposed, limits
    [num_rows], tokens [num_rows, window], all int32. Returns num_valid, num_drafted, num_matched [Y] int32, and lengths
    [Y] int64, the new tokens included.
    """
    num_rows, width = token_ids.shape
    assert rows.is_contiguous()
    num_valid, num_drafted, num_matched = (torch.empty_like(rows, dtype=torch.int32) for _ in range(3))
    lengths = torch.empty_like(rows)
    _verify[(num_rows,)](
        token_ids.contiguous(),
        rows,
        first,
        first.stride(0),
        draft_ids,
        num_proposed,
        limits,
        tokens,
        num_valid,
        num_drafted,
        num_matched,
        lengths,
        tokens.shape[1],
        K=width - 1,
        K_MAX=draft_ids.shape[1],
        BLOCK=triton.next_power_of_2(width),
        num_warps=1,
    )
    return num_valid, num_drafted, num_matched, lengths


@triton.jit(do_not_specialize_on_alignment=["rows", "firsts"])  # an element per program
def _verify(
    token_ids,
    rows,
    firsts,
    first_stride,
    draft_ids,
    num_proposed,
    limits,
    tokens,
    num_valid,
    num_drafted,
    num_matched,
    lengths,
    window,
    K: tl.constexpr,
    K_MAX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0)
    row = tl.load(rows + index).to(tl.int64)
    first = tl.load(firsts + index * first_stride).to(tl.int32)
    places = tl.arange(0, BLOCK)
    chosen = tl.load(token_ids + index * (1 + K) + places, mask=places <= K, other=-1)
    # At K = 0 the first draft is compared all the same, as a shadow.
    num_compared: tl.constexpr = K if K > 0 else 1
    drafted = tl.minimum(tl.load(num_proposed + row), num_compared)
    drafts = tl.load(draft_ids + row * K_MAX + places, mask=places < drafted, other=-2)
    matched = tl.min(tl.where((places < drafted) & (drafts == chosen), BLOCK, places), axis=0)
    matched = tl.minimum(matched, drafted)  # all places of the block may have matched
    room = tl.maximum(tl.load(limits + row) - first, 1)
    valid = tl.minimum(1 + tl.minimum(matched, K), room)
    tl.store(num_valid + index, valid)
    tl.store(num_drafted + index, drafted)
    tl.store(num_matched + index, matched)
    tl.store(lengths + index, (first + valid).to(tl.int64))
    tl.store(tokens + row * window + (first + places) % window, chosen, mask=places < valid)

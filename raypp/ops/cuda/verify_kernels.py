"""Kernels that decide how many tokens a row keeps.

verify   as many as its drafts equal the model's tokens; writes these to the rows' table.
         Twin: `raypp.specdec.draft_tables.DraftTables`
hold     under a grammar, as many as there are masks for. Twin: `raypp.ops.sample.step_masks.hold`
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from raypp.ops.sample.step_masks import FREE, StepMasks, YieldedTokens

_FREE = tl.constexpr(FREE)


def verify_and_append(
    token_ids: torch.Tensor,
    rows: torch.Tensor,
    first: torch.Tensor,
    draft_ids: torch.Tensor,
    num_proposed: torch.Tensor,
    limits: torch.Tensor,
    tokens: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accept drafts up to the first that is not the model's own token, and write the model's into the rows' table.

    Shapes: token_ids [Y, 1 + K] int32, the model's tokens; rows [Y] int64 contiguous; first [Y] int64, the position of
    each row's first token, with any stride; tables by row: draft_ids [num_rows, K_max], num_proposed, limits
    [num_rows], tokens [num_rows, W] of `raypp.ops.row_tokens`, all int32. Returns num_valid, num_drafted, num_matched
    [Y] int32, and lengths [Y] int64, the new tokens included.
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


def hold(tokens: YieldedTokens, masks: StepMasks, last: torch.Tensor) -> torch.Tensor:
    """Let each row keep at most as many tokens as it has masks for; see `raypp.ops.sample.step_masks.hold`."""
    rows, positions, token_ids, draft_ids = tokens.rows, tokens.positions, tokens.token_ids, tokens.draft_ids
    num_rows, width = token_ids.shape
    assert rows.is_contiguous()
    assert token_ids.is_contiguous()
    lengths = torch.empty_like(rows)
    num_drafted, num_matched = tokens.compared or (tokens.num_valid, tokens.num_valid)
    if num_rows:
        _hold[(num_rows,)](
            token_ids,
            tokens.num_valid,
            num_drafted,
            num_matched,
            lengths,
            rows,
            positions,
            positions.stride(0),
            token_ids if draft_ids is None else draft_ids,
            masks.num_masks,
            masks.positions,
            masks.draft_ids,
            last,
            HAS_COMPARED=bool(tokens.compared),
            K=width - 1,
            K_MAX=0 if draft_ids is None else draft_ids.shape[1],
            MASK_K=masks.draft_ids.stride(0),
            HISTORY_LEN=last.shape[1],
            BLOCK=triton.next_power_of_2(width),
            num_warps=1,
        )
    return lengths


@triton.jit(
    do_not_specialize=["first_stride"],
    do_not_specialize_on_alignment=["rows", "firsts"],  # an element per program
)
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
    width,
    K: tl.constexpr,
    K_MAX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0)
    row = tl.load(rows + index).to(tl.int64)
    first = tl.load(firsts + index * first_stride).to(tl.int32)
    places = tl.arange(0, BLOCK)
    chosen = tl.load(token_ids + index * (1 + K) + places, mask=places <= K, other=-1)
    # At K = 0 the first draft is still compared, as a shadow.
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
    tl.store(tokens + row * width + (first + places) % width, chosen, mask=places <= K)


_PER_PROGRAM = ["num_valid", "num_drafted", "num_matched", "rows", "positions", "num_masks", "mask_positions"]


@triton.jit(
    do_not_specialize=["position_stride"],
    do_not_specialize_on_alignment=[*_PER_PROGRAM, "mask_draft_ids"],  # an element per program
)
def _hold(
    token_ids,
    num_valid,
    num_drafted,
    num_matched,
    lengths,
    rows,
    positions,
    position_stride,
    draft_ids,
    num_masks,
    mask_positions,
    mask_draft_ids,
    last,
    HAS_COMPARED: tl.constexpr,
    K: tl.constexpr,
    K_MAX: tl.constexpr,
    MASK_K: tl.constexpr,
    HISTORY_LEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0)
    position = tl.load(positions + index * position_stride)
    valid = tl.load(num_valid + index)
    allowed = tl.load(num_masks + index)
    if allowed != _FREE:
        row = tl.load(rows + index)
        if K > 0:
            place = tl.arange(0, BLOCK)
            drafts = tl.load(draft_ids + row * K_MAX + place, mask=place < K, other=-1)
            expected = tl.load(mask_draft_ids + index * MASK_K + place, mask=place < K, other=-1)
            num_same = tl.min(tl.where((place < K) & (drafts == expected), BLOCK, place), axis=0)
            allowed = tl.minimum(allowed, 1 + tl.minimum(num_same, K))
        allowed = tl.where(position == tl.load(mask_positions + index), allowed, 0)
        valid = tl.minimum(valid, allowed)
        tl.store(num_valid + index, valid)
        if valid == 0:
            before = tl.load(last + row * HISTORY_LEN + (position - 1) % HISTORY_LEN)
            tl.store(token_ids + index * (1 + K), before)
            if HAS_COMPARED:
                tl.store(num_drafted + index, 0)
                tl.store(num_matched + index, 0)
    tl.store(lengths + index, position + valid)

"""Gathers KV blocks of all layers into one piece each, and scatters them back."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 1024  # words at a time


class KernelBlockMover:
    """A `raypp.ops.block_store.BlockMover`: one launch each. Twin: `TorchBlockMover`.

    A program copies what a layer's keys or values have of a block; addresses take 64 bits.
    """

    def gather(self, planes: torch.Tensor, blocks: torch.Tensor, staged: torch.Tensor) -> None:
        _move(planes, blocks, staged, gathers=True)

    def scatter(self, planes: torch.Tensor, blocks: torch.Tensor, staged: torch.Tensor) -> None:
        _move(planes, blocks, staged, gathers=False)


def _move(planes: torch.Tensor, blocks: torch.Tensor, staged: torch.Tensor, *, gathers: bool) -> None:
    num_planes, num_blocks, num_words = planes.shape
    _move_words[(num_planes, len(blocks))](
        planes,
        staged,
        blocks,
        num_planes,
        num_blocks,
        num_words,
        GATHERS=gathers,
        TILE=min(_TILE, triton.next_power_of_2(num_words)),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_planes", "num_blocks"])
def _move_words(
    planes,
    staged,
    blocks,
    num_planes,
    num_blocks,
    num_words,
    GATHERS: tl.constexpr,
    TILE: tl.constexpr,
):
    plane, index = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    inside = planes + (plane * num_blocks + tl.load(blocks + index)) * num_words
    outside = staged + (index * num_planes + plane) * num_words
    for begin in range(0, num_words, TILE):
        word = begin + tl.arange(0, TILE)
        is_word = word < num_words
        if GATHERS:
            tl.store(outside + word, tl.load(inside + word, mask=is_word), mask=is_word)
        else:
            tl.store(inside + word, tl.load(outside + word, mask=is_word), mask=is_word)

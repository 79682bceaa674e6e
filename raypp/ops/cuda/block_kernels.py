"""Gathers KV blocks of all layers into one piece each, and scatters them back."""

from __future__ import annotations

import weakref

import torch
import triton
import triton.language as tl

from raypp.ops.block_store import Planes

_TILE = 1024  # words at a time


class KernelBlockMover:
    """A `raypp.ops.block_store.BlockMover`: one launch each per width of planes. Twin: `TorchBlockMover`.

    A program copies what a layer's keys or values have of a block; addresses take 64 bits.
    """

    def __init__(self) -> None:
        self._addresses: weakref.WeakKeyDictionary[Planes, list[torch.Tensor]] = weakref.WeakKeyDictionary()

    def gather(self, planes: Planes, blocks: torch.Tensor, staged: torch.Tensor) -> None:
        self._move(planes, blocks, staged, gathers=True)

    def scatter(self, planes: Planes, blocks: torch.Tensor, staged: torch.Tensor) -> None:
        self._move(planes, blocks, staged, gathers=False)

    def _move(self, planes: Planes, blocks: torch.Tensor, staged: torch.Tensor, *, gathers: bool) -> None:
        if planes not in self._addresses:  # once, at start: a store copies its null block then
            self._addresses[planes] = [
                torch.tensor([plane.data_ptr() for plane in of_width.planes], device=planes.device)
                for of_width in planes.sets
            ]
        for of_width, addresses in zip(planes.sets, self._addresses[planes], strict=True):
            _move_words[(len(addresses), len(blocks))](
                addresses,
                staged,
                blocks,
                planes.num_words,
                of_width.offset,
                of_width.num_words,
                IS_ALIGNED=all(plane.data_ptr() % 16 == 0 for plane in of_width.planes),
                GATHERS=gathers,
                TILE=min(_TILE, triton.next_power_of_2(of_width.num_words)),
                num_warps=4,
            )


@triton.jit
def _move_words(
    addresses,
    staged,
    blocks,
    piece_words,
    offset,
    num_words,
    IS_ALIGNED: tl.constexpr,
    GATHERS: tl.constexpr,
    TILE: tl.constexpr,
):
    plane, index = tl.program_id(0), tl.program_id(1).to(tl.int64)
    address = tl.load(addresses + plane)
    if IS_ALIGNED:
        address = tl.multiple_of(address, 16)
    inside = address.to(tl.pointer_type(staged.dtype.element_ty)) + tl.load(blocks + index) * num_words
    outside = staged + index * piece_words + offset + plane * num_words
    for begin in range(0, num_words, TILE):
        word = begin + tl.arange(0, TILE)
        is_word = word < num_words
        if GATHERS:
            tl.store(outside + word, tl.load(inside + word, mask=is_word), mask=is_word)
        else:
            tl.store(inside + word, tl.load(outside + word, mask=is_word), mask=is_word)

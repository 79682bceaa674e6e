"""KV blocks in CPU memory, of caches on any device; see `raypp.messages.BlockCopies`.

A store belongs to caches with the same blocks: those of layers that use one block table, or that of a draft head. One
block of all these layers lies in one piece in CPU memory, so a block is one transfer, and neighbours are one together.
Each layer's keys are a plane of blocks, and its values another; their widths may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from raypp.messages import Int32s
from raypp.ops.kv_cache import LayerCache, sides, zeros_on_demand

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class BlockStore(Protocol):
    """CPU memory for blocks of some caches, or for rows' states. On a GPU the current stream does what is ordered."""

    def copy_out(self, blocks: Int32s, cpu_blocks: Int32s) -> None:
        """Copy blocks of the caches to CPU memory. Shapes: [n] both; `cpu_blocks` all differ."""

    def copy_in(self, blocks: Int32s, cpu_blocks: Int32s) -> None:
        """Copy blocks from CPU memory into the caches. Shapes: [n] both; `blocks` all differ."""


@dataclass(frozen=True, eq=False)
class PlaneSet:
    """Planes of one width: keys or values of P layers."""

    planes: tuple[torch.Tensor, ...]  # [num_blocks, words] each
    offset: int  # where they begin in a piece, in words

    @property
    def num_words(self) -> int:
        """Of a block of one plane."""
        return int(self.planes[0].shape[1])


class Planes:
    """The planes of caches with the same blocks, and where each lies in a piece, which has a block of every plane.

    Args:
        caches: Of layers with the same blocks.
    """

    def __init__(self, caches: Sequence[LayerCache]) -> None:
        planes = [side.view(len(side), -1).view(torch.uint8) for side in sides(caches)]
        word = next(word for word in _WORDS if all(plane.shape[1] % word.itemsize == 0 for plane in planes))
        by_width: dict[int, list[torch.Tensor]] = {}
        for plane in planes:
            by_width.setdefault(plane.shape[1], []).append(plane.view(word))
        self.dtype = word
        """The words in which planes are copied."""
        self.device = planes[0].device
        self.sets: list[PlaneSet] = []
        self.num_words = 0
        """Of a piece."""
        for of_width in by_width.values():
            self.sets.append(PlaneSet(tuple(of_width), self.num_words))
            self.num_words += len(of_width) * self.sets[-1].num_words

    @property
    def piece_bytes(self) -> int:
        """Of a block of every plane."""
        return self.num_words * self.dtype.itemsize

    def pieces(self, count: int) -> torch.Tensor:
        """Return room for so many pieces on the planes' device, [count, words]."""
        return torch.empty(count, self.num_words, dtype=self.dtype, device=self.device)


class BlockMover(Protocol):
    """Copies between planes and pieces of whole blocks, on one device."""

    def gather(self, planes: Planes, blocks: torch.Tensor, staged: torch.Tensor) -> None:
        """Copy blocks into one piece each. Shapes: blocks [n] int64; staged [n, words of a piece]."""

    def scatter(self, planes: Planes, blocks: torch.Tensor, staged: torch.Tensor) -> None:
        """Copy pieces back into blocks, which all differ. Shapes: as `gather`."""


class TorchBlockMover:
    """On any device."""

    def gather(self, planes: Planes, blocks: torch.Tensor, staged: torch.Tensor) -> None:
        for plane, part in _parts(planes, staged):
            part.copy_(plane.index_select(0, blocks))

    def scatter(self, planes: Planes, blocks: torch.Tensor, staged: torch.Tensor) -> None:
        for plane, part in _parts(planes, staged):
            plane.index_copy_(0, blocks, part)


def _parts(planes: Planes, staged: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each plane, and its part of pieces, [n, words]."""
    for of_width in planes.sets:
        for index, plane in enumerate(of_width.planes):
            yield plane, staged.narrow(1, of_width.offset + index * of_width.num_words, of_width.num_words)


class TorchBlockStore:
    """Copies at once.

    Args:
        caches: Of layers with the same blocks.
        num_cpu_blocks: Blocks that there is room for.
    """

    def __init__(self, caches: Sequence[LayerCache], num_cpu_blocks: int) -> None:
        self._planes = Planes(caches)
        self._mover = TorchBlockMover()
        shape = num_cpu_blocks, self._planes.num_words
        self._memory = zeros_on_demand(num_cpu_blocks * self._planes.num_words, self._planes.dtype).view(shape)

    def copy_out(self, blocks: Int32s, cpu_blocks: Int32s) -> None:
        staged = self._planes.pieces(len(blocks))
        self._mover.gather(self._planes, _indices(blocks), staged)
        self._memory.index_copy_(0, _indices(cpu_blocks), staged)

    def copy_in(self, blocks: Int32s, cpu_blocks: Int32s) -> None:
        self._mover.scatter(self._planes, _indices(blocks), self._memory.index_select(0, _indices(cpu_blocks)))


class RowStore:
    """Copies rows of tensors. They are so wide that each is a transfer of its own.

    Args:
        tensors: On one device of any kind, [rows, ...] each.
        num_places: Rows that there is room for.
        open_memory: Returns memory of the CPU for as long as its owner lives, [num_bytes] uint8, given both. It is
            page-locked for tensors on a GPU.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], num_places: int, open_memory: Callable[[int, object], torch.Tensor]
    ) -> None:
        self._tensors = [tensor.view(len(tensor), -1).view(torch.uint8) for tensor in tensors]
        self._widths = [tensor.shape[1] for tensor in self._tensors]
        num_bytes = sum(self._widths)
        self._memory = open_memory(num_places * num_bytes, self).view(num_places, num_bytes)

    def copy_out(self, blocks: Int32s, cpu_blocks: Int32s) -> None:
        for row, place in zip(blocks.tolist(), cpu_blocks.tolist(), strict=True):
            torch._foreach_copy_(self._parts_in(place), self._parts_of(row), non_blocking=True)

    def copy_in(self, blocks: Int32s, cpu_blocks: Int32s) -> None:
        for row, place in zip(blocks.tolist(), cpu_blocks.tolist(), strict=True):
            torch._foreach_copy_(self._parts_of(row), self._parts_in(place), non_blocking=True)

    def _parts_of(self, row: int) -> list[torch.Tensor]:
        return [tensor[row] for tensor in self._tensors]

    def _parts_in(self, place: int) -> list[torch.Tensor]:
        return list(self._memory[place].split(self._widths))


def _indices(blocks: Int32s) -> torch.Tensor:
    return torch.from_numpy(blocks.astype(np.int64))

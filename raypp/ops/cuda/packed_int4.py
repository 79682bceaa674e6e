"""How weights of 4 bits lie in memory for the kernels that multiply them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from operator import itemgetter

import torch
import torch.nn.functional as F  # noqa: N812

from raypp.ops.weight import FP4, Weight

TILE = 64
"""Outputs, and inputs, of a tile."""

FP4_SCALE_EXPONENT = 80
"""Scales of floats are multiplied by 2 to the power of it: a code without its bias is 2^126 times too small.

Scales from 2^48 on would be infinite.
"""

_PADDED_OUTPUTS = 128
_PIECE_OUTPUTS = 1024


def _fp4_order() -> list[int]:
    """Return which bit of 8 bytes of nibbles lies at each bit of two words of 32.

    Two codes of a word, one in each half, become two bfloat16 by a rotation and a mask: a sign in bit 15 of the half,
    the others in bits 8 to 6. A word has room for three such pairs, of which one needs no rotation. What is left, bits
    4, 5, 13 and 14 of each half, holds a pair of both words together, which are laid over each other for it.
    """

    def source(word: int, pair: int, bit: int) -> tuple[int, int]:
        """Return the word and the bit that become a bit of the result."""
        if pair < 3:
            return word, (bit - (0, 6, -4)[pair]) % 32
        bit = (bit - (2, 8)[word]) % 32
        return (0, bit) if bit % 16 in (4, 5, 13, 14) else (1, (bit - 2) % 32)

    order = [0] * 64
    for word in range(2):
        for pair in range(4):
            for half in range(2):
                nibble = 8 * (4 * word + 2 * (pair % 2) + half) + 4 * (pair // 2)
                for number, bit in enumerate((6, 7, 8, 15)):
                    at_word, at_bit = source(word, pair, bit + 16 * half)
                    order[32 * at_word + at_bit] = nibble + number
    return order


FP4_ORDER = _fp4_order()


@dataclass(frozen=True, eq=False)
class PackedInt4:
    """A weight of N outputs, in P parts of as many, and K inputs, or E. A part is padded to N' outputs; inputs to K'.

    A tile is 64 outputs and 64 inputs, 2,048 bytes in a row, in the order in which tensor cores want them. Its first 32
    inputs are the low halves of the bytes, the others the high halves, so that both are parts of one operand
    without a move between threads. Of a tile's bytes, a thread of four warps holds 16, in the order of the registers of
    a product of 16 x 16 (PTX ISA, "Matrix Fragments for wgmma.mma_async.m64nNk16"):

        byte of a tile   [warp 4][output mod 8][input / 2 mod 4][step of 16 inputs 2][half of a step 2]
                         [output / 8 mod 2][input mod 2]

    Floats of 4 bits do not stay nibbles: in 8 bytes, which are one number then, each bit lies where `FP4_ORDER` says,
    and scales are 2^80 times what they were.
    """

    codes: torch.Tensor  # [E * P * N' / 64, K' / 64, 2048] uint8; of floats [.., 256] int64
    scale: torch.Tensor  # [E, C, P * N'] in 16 or 32 bits; of floats bfloat16 or float32
    zero: torch.Tensor | None  # [E, C, P * N'] uint8; None: 8
    group: int  # inputs that share a scale: 32, or a multiple of 64
    num_outputs: int  # N
    num_inputs: int  # K
    num_parts: int  # P
    order: torch.Tensor | None  # [K] int64: x is sorted by it before
    is_fp4: bool = False  # whether codes are floats

    @property
    def padded_outputs(self) -> int:
        """N'."""
        return self.scale.shape[2] // self.num_parts

    @property
    def num_experts(self) -> int:
        """E; 1 where the weight is none of experts."""
        return len(self.scale)

    @property
    def num_bytes(self) -> int:
        """Of all its tensors."""
        tensors = (self.codes, self.scale, self.zero, self.order)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def can_pack(weight: Weight) -> bool:
    """Whether the groups of a weight are of one output and of 32, or multiples of 64, inputs; or all inputs."""
    rows, columns = weight.block
    return rows == 1 and (columns == TILE // 2 or columns % TILE == 0 or columns >= weight.num_inputs)


def pack(weight: Weight, num_parts: int = 1) -> PackedInt4:
    """Return a weight of 4 bits in the order above. A gate and its `up` are two parts."""
    if weight.data.ndim == 3:
        each = [pack(weight.mapped(itemgetter(expert)), num_parts) for expert in range(len(weight.data))]
        zeros = [packed.zero for packed in each if packed.zero is not None]
        return replace(
            each[0],
            codes=torch.cat([packed.codes for packed in each]),
            scale=torch.cat([packed.scale for packed in each]),
            zero=torch.cat(zeros) if zeros else None,
        )
    assert can_pack(weight)
    assert weight.scale is not None
    num_inputs, part_outputs = weight.num_inputs, weight.num_outputs // num_parts
    group = -(-min(weight.block[1], num_inputs) // TILE) * TILE if weight.block[1] != TILE // 2 else TILE // 2
    step = min(group, 2 * TILE) if group % (2 * TILE) == 0 else TILE
    padded_inputs, padded = -(-num_inputs // step) * step, -(-part_outputs // _PADDED_OUTPUTS) * _PADDED_OUTPUTS

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        """Pad each part's outputs: the first dimension."""
        parts = tensor.unflatten(0, (num_parts, part_outputs))
        return F.pad(parts, (0, 0, 0, padded - part_outputs)).flatten(0, 1)

    data = F.pad(rows(weight.data.view(torch.uint8)), (0, (padded_inputs - num_inputs) // 2))
    scale, is_fp4 = weight.scale, weight.kind == "fp4"
    if is_fp4:  # powers of 2 are exact
        scale = (scale if scale.dtype == torch.bfloat16 else scale.float()) * 2.0**FP4_SCALE_EXPONENT
    tiles = [_tiles(piece) for piece in data.split(_PIECE_OUTPUTS)]
    codes = torch.cat(tiles)
    return PackedInt4(
        codes=_moved(codes.view(torch.int64), FP4_ORDER) if is_fp4 else codes,
        scale=rows(scale).t().contiguous().unsqueeze(0),
        zero=None if weight.zero is None else rows(weight.zero).t().contiguous().unsqueeze(0),
        group=group,
        num_outputs=weight.num_outputs,
        num_inputs=num_inputs,
        num_parts=num_parts,
        order=weight.order,
        is_fp4=is_fp4,
    )


def _tiles(data: torch.Tensor) -> torch.Tensor:
    """Return bytes as tiles. Shapes: data [N, K / 2]; result [N / 64, K / 64, 2048]."""
    codes = torch.stack((data & 15, data >> 4), -1).flatten(1)  # [N, K]
    # strip, warp, output / 8 mod 2, output mod 8; tile, half of the byte, step, half of the step, input / 2, input
    codes = codes.view(-1, 4, 2, 8, codes.shape[1] // TILE, 2, 2, 2, 4, 2)
    codes = codes.permute(5, 0, 4, 1, 3, 8, 6, 7, 2, 9)
    codes = codes.contiguous().flatten(3)
    low, high = codes.unbind()
    tiles: torch.Tensor = low | high << 4
    return tiles


def _moved(words: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Return int64 whose bit b is what bit order[b] was."""
    moved = torch.zeros_like(words)
    masks: dict[int, int] = defaultdict(int)
    for bit, source in enumerate(order):
        masks[source - bit] |= 1 << bit
    for places, mask in masks.items():
        part = words >> places if places > 0 else words << -places
        moved |= part & (mask - (1 << 64) if mask >> 63 else mask)
    return moved


def unpack(packed: PackedInt4) -> Weight:
    """Return what `pack` was given, but for the padding of its inputs. Not of experts."""
    tiles, scale = packed.codes, packed.scale[0].t()
    if packed.is_fp4:
        tiles, scale = _moved(tiles, _inverse(FP4_ORDER)).view(torch.uint8), scale * 2.0**-FP4_SCALE_EXPONENT
    tiles = tiles.view(-1, tiles.shape[1], 4, 8, 4, 2, 2, 2, 2)
    codes = torch.stack((tiles & 15, tiles >> 4))  # half, strip, tile, warp, g, t, step, h, r, e
    codes = codes.permute(1, 3, 8, 4, 2, 0, 6, 7, 5, 9).flatten(0, 3).flatten(1)

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        parts: torch.Tensor = tensor.unflatten(0, (packed.num_parts, -1))
        return parts[:, : packed.num_outputs // packed.num_parts].flatten(0, 1).contiguous()

    codes = rows(codes)[:, : packed.num_inputs].unflatten(1, (-1, 2))
    data = torch.bitwise_or(codes[..., 0], codes[..., 1] << 4)
    weight = Weight(data.view(FP4) if packed.is_fp4 else data, rows(scale), block=(1, packed.group))
    zero = None if packed.zero is None else rows(packed.zero[0].t())
    return replace(weight, zero=zero, order=packed.order)


def _inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)

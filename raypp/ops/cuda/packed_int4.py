"""How 4-bit weights lie in a GPU's memory: in the order in which tensor cores want them.

A tile is 64 outputs and 64 inputs, 2,048 bytes in a row. Its first 32 inputs are the low halves of the bytes, the
others the high halves, so that each half is an operand of a product without a move between threads. Of a tile's bytes,
a thread of four warps holds 16, in the order of the registers of a product of 16 x 16 (PTX ISA, "Matrix Fragments for
wgmma.mma_async.m64nNk16"):

    byte of a tile   [warp 4][output mod 8][input / 2 mod 4][step of 16 inputs 2][half of a step 2][output / 8 mod 2]
                     [input mod 2]
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812

from raypp.ops.weight import Weight

TILE = 64
"""Outputs, and inputs, of a tile."""

_PADDED_OUTPUTS = 128
_PIECE_OUTPUTS = 1024


@dataclass(frozen=True, eq=False)
class PackedInt4:
    """A weight of N outputs, in P parts of as many, and K inputs. A part is padded to N' outputs; inputs to K'."""

    codes: torch.Tensor  # [P * N' / 64, K' / 64, 2048] uint8
    scale: torch.Tensor  # [C, P * N'] in 16 or 32 bits
    zero: torch.Tensor | None  # [C, P * N'] uint8; None: 8
    group: int  # inputs that share a scale: 32, or a multiple of 64
    num_outputs: int  # N
    num_inputs: int  # K
    num_parts: int  # P
    order: torch.Tensor | None  # [K] int64: x is sorted by it before

    @property
    def padded_outputs(self) -> int:
        """N'."""
        return self.scale.shape[1] // self.num_parts

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

    data = F.pad(rows(weight.data), (0, (padded_inputs - num_inputs) // 2))
    codes = torch.cat([_tiles(piece) for piece in data.split(_PIECE_OUTPUTS)])
    return PackedInt4(
        codes=codes,
        scale=rows(weight.scale).t().contiguous(),
        zero=None if weight.zero is None else rows(weight.zero).t().contiguous(),
        group=group,
        num_outputs=weight.num_outputs,
        num_inputs=num_inputs,
        num_parts=num_parts,
        order=weight.order,
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


def unpack(packed: PackedInt4) -> Weight:
    """Return what `pack` was given, but for the padding of its inputs."""
    tiles = packed.codes.view(-1, packed.codes.shape[1], 4, 8, 4, 2, 2, 2, 2)
    codes = torch.stack((tiles & 15, tiles >> 4))  # half, strip, tile, warp, g, t, step, h, r, e
    codes = codes.permute(1, 3, 8, 4, 2, 0, 6, 7, 5, 9).flatten(0, 3).flatten(1)

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        parts: torch.Tensor = tensor.unflatten(0, (packed.num_parts, -1))
        return parts[:, : packed.num_outputs // packed.num_parts].flatten(0, 1).contiguous()

    codes = rows(codes)[:, : packed.num_inputs].unflatten(1, (-1, 2))
    weight = Weight(
        torch.bitwise_or(codes[..., 0], codes[..., 1] << 4), rows(packed.scale.t()), block=(1, packed.group)
    )
    zero = None if packed.zero is None else rows(packed.zero.t())
    return replace(weight, zero=zero, order=packed.order)

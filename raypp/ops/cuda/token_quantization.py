"""Rounds a product's input to 8 bits, with scales of its own: one per token, or one per token and block of inputs.

One launch, with what comes before it: a norm, or the gate of an MLP. Twin: `quantized_tokens` of
tests/gpu/reference_ops.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from raypp.ops.cuda.between_products import silu
from raypp.ops.cuda.kernel_launch import Device, start

_MULTIPLE = 16  # a stride of scales that is none would be a kernel of its own
_PIECE = 1024  # inputs of a program that does not need the whole row


@dataclass(frozen=True, eq=False)
class TokenNorm:
    """A norm of tokens."""

    weight: torch.Tensor  # [K]
    eps: float


@dataclass(frozen=True, eq=False)
class QuantizedTokens:
    """T tokens in 8 bits: data * scale is within 2^-4 of each element. T' is T up to a multiple of 16.

    Past T there is anything: the library wants its rows and scales aligned.
    """

    data: torch.Tensor  # [T', K] float8_e4m3fn
    scale: torch.Tensor  # [C, T'] float32, of C blocks of inputs
    num_tokens: int

    @property
    def tokens(self) -> torch.Tensor:
        """The data of the T tokens."""
        return self.data[: self.num_tokens]


def quantize_tokens(
    x: torch.Tensor, block: int, device: Device, norm: TokenNorm | None = None, *, is_gated: bool = False
) -> QuantizedTokens:
    """Return x, its norm or its gate in 8 bits, with ceil(K / block) scales per token.

    Shapes: x [T, K], with a gate [T, 2 K], contiguous. `block` is a power of two, or at least K.
    """
    num_tokens, size = x.shape[0], x.shape[1] // (2 if is_gated else 1)
    num_blocks = triton.cdiv(size, block)
    num_padded = triton.cdiv(num_tokens, _MULTIPLE) * _MULTIPLE
    quantized = torch.empty(num_padded, size, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(num_blocks, num_padded, dtype=torch.float32, device=x.device)
    if not num_tokens:
        return QuantizedTokens(quantized, scale, num_tokens)
    piece = triton.next_power_of_2(size)
    if norm is None and num_blocks > 1:
        piece = min(piece, max(_PIECE, block))
    _quantize_tokens[(num_tokens, triton.cdiv(size, piece))](
        x,
        x if norm is None else norm.weight,
        quantized,
        scale,
        0.0 if norm is None else norm.eps,
        size,
        num_blocks,
        num_padded,
        HAS_NORM=norm is not None,
        HAS_GATE=is_gated,
        BLOCK=piece if num_blocks == 1 else block,
        PIECE=piece,
        OVERLAPS=device.has_dependent_launch,
        num_warps=min(16, max(1, piece // 512)),
        **device.launch_options,
    )
    return QuantizedTokens(quantized, scale, num_tokens)


@triton.jit
def in_8_bits(value, AXIS: tl.constexpr):
    """Return float32 as float8_e4m3fn, and what to multiply it by: each line along the axis uses the whole range."""
    largest = tl.maximum(tl.max(tl.abs(value), AXIS), 448e-30)  # a line of zeros
    return (value * tl.expand_dims(448.0 / largest, AXIS)).to(tl.float8e4nv), largest * (1.0 / 448.0)


@triton.jit
def _quantize_tokens(
    x,
    norm_weight,
    y,
    scale,
    eps,
    size,
    num_blocks,
    num_padded,
    HAS_NORM: tl.constexpr,
    HAS_GATE: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = piece * PIECE + tl.arange(0, PIECE)
    inside = column < size
    if HAS_NORM:
        factor = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
    start(OVERLAPS)
    if HAS_GATE:
        gate = tl.load(x + row * 2 * size + column, mask=inside, other=0.0).to(tl.float32)
        value = silu(gate) * tl.load(x + row * 2 * size + size + column, mask=inside, other=0.0).to(tl.float32)
    else:
        value = tl.load(x + row * size + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        value *= tl.rsqrt(tl.sum(value * value, 0) / size + eps) * factor
    blocks = tl.reshape(value, (PIECE // BLOCK, BLOCK))
    result, by_block = in_8_bits(blocks, 1)
    tl.store(y + row * size + column, tl.reshape(result, (PIECE,)), mask=inside)
    block = piece * (PIECE // BLOCK) + tl.arange(0, PIECE // BLOCK)
    tl.store(scale + block * num_padded + row, by_block, mask=block < num_blocks)

"""A weight matrix in the form in which a checkpoint stores it: floats, or numbers of 8 or 4 bits with scales.

    plain   data [N, K] in 16 or 32 bits
    fp8     data [N, K] float8_e4m3fn           value = data * scale
    int8    data [N, K] int8                    value = data * scale
    int4    data [N, K / 2] uint8               value = (data - zero) * scale; input 2i is the low half of byte i
    fp4     data [N, K / 2] float4_e2m1fn_x2    value = data * scale; input 2i is the low half of byte i

A block of outputs and inputs shares a scale: 128 x 128, or one output and a group of inputs, or one output and all of
them. The weights of E experts have one more dimension in front. Each kernel set makes products of these forms, see
`raypp.ops.backend`; `dequantized` says what they mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812

WeightKind = Literal["plain", "fp8", "int8", "int4", "fp4"]
FP4 = torch.float4_e2m1fn_x2
"""Two numbers of 4 bits in a byte: sign, two bits of exponent, one of fraction."""

_KINDS: dict[torch.dtype, WeightKind] = {
    torch.float8_e4m3fn: "fp8",
    torch.int8: "int8",
    torch.uint8: "int4",
    FP4: "fp4",
}
_MIDDLE = 8
"""The zero of 4-bit integers that have none of their own."""
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the codes without a sign."""


@dataclass(frozen=True, eq=False)
class Weight:
    """A matrix of N outputs and K inputs, or E of them. R = ceil(N / rows) and C = ceil(K / columns) blocks."""

    data: torch.Tensor  # [..., N, K], or [..., N, K / 2] for 4 bits
    scale: torch.Tensor | None = None  # [..., R, C] floats; None: plain
    zero: torch.Tensor | None = None  # [..., R, C] uint8, of int4; None: 8
    block: tuple[int, int] = (1, 1)  # rows (outputs) and columns (inputs) that share a scale and a zero
    order: torch.Tensor | None = None  # [..., K] int64: column j belongs to input order[j]; None: as they come

    @property
    def kind(self) -> WeightKind:
        """The form of `data`."""
        return _KINDS.get(self.data.dtype, "plain")

    @property
    def form(self) -> tuple[object, ...]:
        """What weights that are one product have in common, but for the order of inputs."""
        scale_dtype = None if self.scale is None else self.scale.dtype
        return self.kind, scale_dtype, self.zero is None, self.num_inputs, self.block[1]

    @property
    def num_outputs(self) -> int:
        """N."""
        return self.data.shape[-2]

    @property
    def num_inputs(self) -> int:
        """K."""
        return self.data.shape[-1] * (2 if self.kind in ("int4", "fp4") else 1)

    @property
    def num_bytes(self) -> int:
        """Of all its tensors."""
        tensors = (self.data, self.scale, self.zero, self.order)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix, [..., N, K], in `dtype`; plain data of that type are returned as they are."""
        if self.scale is None:
            return self.data.to(dtype)
        if self.data.ndim > 2:  # one by one: what is computed in between takes several times as much
            matrices = torch.empty(*self.data.shape[:-1], self.num_inputs, dtype=dtype, device=self.data.device)
            for index, matrix in enumerate(matrices):
                matrix.copy_(self.mapped(itemgetter(index)).dequantized(dtype))
            return matrices
        if self.kind in ("int4", "fp4"):
            in_bytes = self.data.view(torch.uint8)
            codes = torch.stack((in_bytes & 15, in_bytes >> 4), -1).flatten(-2)
            values = codes.float() if self.kind == "int4" else _fp4_values(codes)
        else:
            values = self.data.float()
        if self.kind == "int4":
            values -= _MIDDLE if self.zero is None else self._spread(self.zero.float())
        matrix = (values * self._spread(self.scale.float())).to(dtype)
        if self.order is None:
            return matrix
        order = self.order.unsqueeze(-2).expand(matrix.shape)
        return torch.empty_like(matrix).scatter_(-1, order, matrix)

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Weight:
        """Return the weight with each of its tensors changed."""
        scale, zero, order = (None if part is None else change(part) for part in (self.scale, self.zero, self.order))
        return replace(self, data=change(self.data), scale=scale, zero=zero, order=order)

    def of_experts(self, experts: slice) -> Weight:
        """Return some of the experts whose weight it is."""
        return self.mapped(lambda part: own_copy(_in_bytes(part)[experts]).view(part.dtype))

    def part(self, outputs: slice, inputs: slice) -> Weight:
        """Return some consecutive outputs and inputs. A part that ends within blocks gets smaller ones.

        Inputs in an order of their own cannot be cut.
        """
        rows, columns = self.block
        if self.scale is None:
            return Weight(own_copy(self.data[..., outputs, inputs]))
        if columns < self.num_inputs and (inputs.start or inputs.stop < self.num_inputs):
            assert self.order is None, "inputs in an order of their own"
            return self._with_columns(math.gcd(columns, inputs.start, inputs.stop))._part(outputs, inputs)
        if outputs.start % rows or (outputs.stop % rows and outputs.stop < self.num_outputs):
            return by_output(self)._part(outputs, inputs)
        return self._part(outputs, inputs)

    def _with_columns(self, columns: int) -> Weight:
        """Return the weight with blocks of fewer inputs, a divisor of what they have."""
        times, num_blocks = self.block[1] // columns, -(-self.num_inputs // columns)
        if times == 1:
            return self

        def spread(by_block: torch.Tensor | None) -> torch.Tensor | None:
            return None if by_block is None else by_block.repeat_interleave(times, -1)[..., :num_blocks]

        return replace(self, scale=spread(self.scale), zero=spread(self.zero), block=(self.block[0], columns))

    def _part(self, outputs: slice, inputs: slice) -> Weight:
        rows, columns = self.block
        if outputs.start % rows or (outputs.stop % rows and outputs.stop < self.num_outputs):
            return by_output(self)._part(outputs, inputs)
        in_byte = self.num_inputs // self.data.shape[-1]
        of_bytes = slice(inputs.start // in_byte, inputs.stop // in_byte)
        first, last = outputs.start // rows, -(-outputs.stop // rows)
        is_whole = columns >= self.num_inputs
        blocks = slice(0, 1) if is_whole else slice(inputs.start // columns, -(-inputs.stop // columns))

        def of_blocks(by_block: torch.Tensor | None) -> torch.Tensor | None:
            return None if by_block is None else own_copy(by_block[..., first:last, blocks])

        data = own_copy(_in_bytes(self.data)[..., outputs, of_bytes]).view(self.data.dtype)
        block = (rows, inputs.stop - inputs.start if is_whole else columns)
        return replace(self, data=data, scale=of_blocks(self.scale), zero=of_blocks(self.zero), block=block)

    def sorted_outputs(self, order: Sequence[int]) -> Weight:
        """Return the weight with its outputs in another order: output i is the one that was order[i]."""
        rows = self.block[0]
        firsts = order[::rows]
        are_whole = list(order) == [first + row for first in firsts for row in range(rows)]
        if are_whole and not any(first % rows for first in firsts):
            return self._with_outputs(order, [first // rows for first in firsts])
        return by_output(self)._with_outputs(order, order)

    def _with_outputs(self, outputs: Sequence[int], blocks: Sequence[int]) -> Weight:
        of_outputs, of_blocks = (torch.tensor(each, device=self.data.device) for each in (outputs, blocks))
        data = _in_bytes(self.data).index_select(-2, of_outputs).view(self.data.dtype)
        scale, zero = (None if part is None else part.index_select(-2, of_blocks) for part in (self.scale, self.zero))
        return replace(self, data=data, scale=scale, zero=zero)

    def _spread(self, by_block: torch.Tensor) -> torch.Tensor:
        """Return a number per block as one per element."""
        rows, columns = self.block
        by_row = by_block if rows == 1 else by_block.repeat_interleave(rows, -2)[..., : self.num_outputs, :]
        return by_row.repeat_interleave(columns, -1)[..., : self.num_inputs]


def _fp4_values(codes: torch.Tensor) -> torch.Tensor:
    table = torch.tensor([*_FP4_VALUES, *(-value for value in _FP4_VALUES)], device=codes.device)
    return table[codes.int()]


def _in_bytes(data: torch.Tensor) -> torch.Tensor:
    """Return numbers of 8 bits or fewer as bytes, which torch copies in any way."""
    return data.view(torch.uint8) if data.element_size() == 1 else data


def own_copy(part: torch.Tensor) -> torch.Tensor:
    """Return a part of a tensor that does not keep the rest in memory, as `contiguous` may."""
    return part.clone(memory_format=torch.contiguous_format)


def has_form_of(one: Weight, other: Weight, *, with_order: bool = True) -> bool:
    """Return whether two weights can be stacked: of one kind, the same inputs in a block, in one order."""
    if one.form != other.form or not with_order:
        return one.form == other.form
    if one.order is None or other.order is None:
        return one.order is other.order
    return torch.equal(one.order, other.order)


def stacked_weights(weights: Sequence[Weight]) -> Weight:
    """Return weights of one form (`has_form_of`) one below the other, as one product.

    Where a weight ends within a block of outputs, each output gets a scale of its own.
    """
    first, rows = weights[0], weights[0].block[0]
    if len(weights) == 1:
        return first
    assert all(has_form_of(first, weight) for weight in weights)
    if any(weight.num_outputs % rows for weight in weights[:-1]) or len({weight.block for weight in weights}) > 1:
        weights = [by_output(weight) for weight in weights]
        first = weights[0]

    def joined(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        there = [part for part in parts if part is not None]
        return torch.cat(there, -2) if there else None

    return replace(
        first,
        data=torch.cat([_in_bytes(weight.data) for weight in weights], -2).view(first.data.dtype),
        scale=joined([weight.scale for weight in weights]),
        zero=joined([weight.zero for weight in weights]),
    )


def by_output(weight: Weight) -> Weight:
    """Return a weight whose blocks are one output high."""
    rows, columns = weight.block

    def spread(by_block: torch.Tensor | None) -> torch.Tensor | None:
        if by_block is None or rows == 1:
            return by_block
        return by_block.repeat_interleave(rows, -2)[..., : weight.num_outputs, :].contiguous()

    return replace(weight, scale=spread(weight.scale), zero=spread(weight.zero), block=(1, columns))


_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_PIECE_ROWS = 1024


def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight in 8 bits, and its scale: quantized * scale is within 2^-4 of each element.

    Shapes: weight [N, K]; quantized [N, K] float8_e4m3fn; scale [N] float32. Elements below 2^-14 of their row's
    largest lose more.
    """
    quantized = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scale = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    pieces = zip(weight.split(_PIECE_ROWS), quantized.split(_PIECE_ROWS), scale.split(_PIECE_ROWS), strict=True)
    for rows, into, of_rows in pieces:  # in float32, a piece at a time
        values = rows.float()
        of_rows.copy_(values.abs().amax(1) / _LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)  # a row of zeros
        into.copy_((values / of_rows[:, None]).clamp_(-_LARGEST, _LARGEST))
    return quantized, scale


def rounded_to_8_bits(weight: torch.Tensor) -> Weight:
    """Return a weight [N, K] with a scale per row; see `quantize_rows`."""
    data, scale = quantize_rows(weight)
    return Weight(data, scale[:, None], block=(1, weight.shape[1]))


def linear_in_float32(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return x W^T, [T, N] float32, in `out` if that is given. Only a CPU rounds it to x's type first.

    Shapes: x [T, K]; weight [N, K]; out [T, N] float32.
    """
    if x.dtype == torch.float32:
        return torch.mm(x, weight.t(), out=out)
    if x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
    y = F.linear(x, weight).to(torch.float32)
    return y if out is None else out.copy_(y)

"""Projections of quantized weights: which kernel computes them, by their form and the number of rows.

fp8    1 row         of a scale per output: element by element, x in 16 bits, norm included
       more          x in 8 bits, with scales of its own; tensor cores, then the library
4 bits up to 256     after the norm, tensor cores in 16 bits; codes are expanded in registers
       more          pieces of the weight in 16 bits, which the library multiplies
"""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace

import torch
import triton

from raypp.ops.cuda.between_products import rms_norm, silu_and_mul
from raypp.ops.cuda.int4_products import (
    Int4Product,
    Int4Tuning,
    dequantized_int4,
    int4_partial_floats,
    project_int4,
)
from raypp.ops.cuda.kernel_launch import Device, Workspace
from raypp.ops.cuda.packed_int4 import can_pack, pack
from raypp.ops.cuda.product_tuning import (
    most_exact_rows_of_fp8,
    most_own_rows_of_fp8,
    tune_fp8,
    tune_int4,
)
from raypp.ops.cuda.projection import Product, Tuning, partial_floats, project
from raypp.ops.cuda.token_quantization import QuantizedTokens, TokenNorm, quantize_tokens
from raypp.ops.weight import Weight, by_output

LibraryProduct = Callable[[QuantizedTokens, torch.Tensor, torch.Tensor], torch.Tensor]
"""(x, weight [N, K], its prepared scale) -> x W^T, [T', N] in bfloat16."""

BLOCK = 128

_LOG = logging.getLogger(__name__)


def scaled_by_output(x: QuantizedTokens, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return a product of one scale per token, and output, [1, N]."""
    y = torch._scaled_mm(x.data, weight.t(), scale_a=x.scale.t(), scale_b=scale, out_dtype=torch.bfloat16)
    assert isinstance(y, torch.Tensor)
    return y


def scaled_by_block(x: QuantizedTokens, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return a product of one scale per token and 128 inputs, and per 128 x 128 of the weight, [C', R]."""
    from torch.nn.functional import ScalingType, scaled_mm  # since torch 2.10

    return scaled_mm(
        x.data,
        weight.t(),
        x.scale.t(),
        ScalingType.BlockWise1x128,
        scale,
        ScalingType.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )


def prepared_scale(product: LibraryProduct, scale: torch.Tensor) -> torch.Tensor:
    """Return a weight's scale, [R, C], as a product reads it: rows of blocks are padded to a multiple of 4."""
    if product is scaled_by_output:
        return scale.t().contiguous()
    return torch.nn.functional.pad(scale, (0, -scale.shape[1] % 4)).t()


def library_product(weight: Weight, device: torch.device) -> LibraryProduct | None:
    """Return how the library (cuBLASLt, CUTLASS) multiplies a weight in 8 bits, for many rows; None: it does not.

    Names of functions and layouts of scales differ between versions of torch, so each way is tried once, on a small
    product whose result is known.
    """
    if device.type != "cuda" or weight.num_inputs % 16 or weight.num_outputs % 16:
        return None
    if weight.block[1] >= weight.num_inputs:
        return _tried(scaled_by_output, 1, 512, device)
    if weight.block != (BLOCK, BLOCK) or weight.num_inputs % BLOCK or weight.num_outputs % BLOCK:
        return None
    is_padded = weight.num_inputs // BLOCK % 4 > 0
    return _tried(scaled_by_block, BLOCK, 768 if is_padded else 512, device)


@functools.cache
def _tried(product: LibraryProduct, block: int, num_inputs: int, device: torch.device) -> LibraryProduct | None:
    """Return a product that yields what it should; None if it does not."""
    num_rows, num_outputs = 98, 256
    blocks = num_inputs // block if block > 1 else 1
    x_scale = torch.rand(blocks, 100, device=device)
    data = torch.ones(100, num_inputs, device=device).to(torch.float8_e4m3fn)
    weight = torch.ones(num_outputs, num_inputs, device=device).to(torch.float8_e4m3fn)
    scale = torch.rand(num_outputs // block, blocks, device=device)
    expected = (x_scale.double().t() @ scale.double().t() * (num_inputs // blocks)).repeat_interleave(block, 1)
    try:
        y = product(QuantizedTokens(data, x_scale, num_rows), weight, prepared_scale(product, scale))
        torch.testing.assert_close(y.double(), expected, rtol=2e-2, atol=1e-2)
    except (
        AssertionError,
        AttributeError,
        ImportError,
        NotImplementedError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        _LOG.info("own kernels multiply many rows in 8 bits, not %s: %s", product.__name__, error)
        return None
    return product


MAX_OWN_ROWS_OF_INT4 = 256
"""With more rows, the weight is expanded and the library computes."""

_LEAST_BLOCK = 32  # inputs that tensor cores multiply at once
_PIECE_OUTPUTS = 4096  # of a weight that is expanded at once


def has_kernel(weight: Weight) -> bool:
    """Whether one of the classes below computes products of a weight."""
    columns = weight.block[1]
    if weight.kind in ("int4", "fp4"):
        return can_pack(weight)
    if columns >= weight.num_inputs:
        return weight.kind == "fp8"
    return weight.kind == "fp8" and columns >= _LEAST_BLOCK and columns & (columns - 1) == 0


class QuantizedProjection(ABC):
    """A product with a quantized weight, with its norm before it and its gate or sum after it.

    Args:
        weight: [N, K], with a gate [2 N, K].
        bias: [N], with a gate [2 N].
        norm: Of the input.
        device: Where it runs.
        workspace: For products that are split.
        is_gated: Whether the result is silu(gate) * up.
    """

    def __init__(
        self,
        weight: Weight,
        bias: torch.Tensor | None,
        norm: TokenNorm | None,
        device: Device,
        workspace: Workspace,
        *,
        is_gated: bool = False,
    ) -> None:
        self._bias = bias
        self._norm = norm
        self._device = device
        self._workspace = workspace
        self._is_gated = is_gated
        self._num_outputs = weight.num_outputs // (2 if is_gated else 1)
        self._take(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return norm(x) W^T + b, or its gate, [T, N]. Shapes: x [T, K] contiguous."""
        return self._computed(x, None) if len(x) else x.new_empty(0, self._num_outputs)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return residual + x W^T + b, [T, N]. Shapes: x [T, K] contiguous; residual [T, N]."""
        return self._computed(x, residual) if len(x) else x.new_empty(0, self._num_outputs)

    @abstractmethod
    def _take(self, weight: Weight) -> None:
        """Bring the weight into the form that kernels read, and reserve what they need of the workspace."""

    @abstractmethod
    def _computed(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Return all of it, [T, N], of one row or more."""

    def _finished(self, y: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Return what follows a product of the library."""
        if self._bias is not None:
            y += self._bias
        if self._is_gated:
            return silu_and_mul(y, self._device)
        return y if residual is None else residual.add_(y)


class Fp8Projection(QuantizedProjection):
    """A product with a weight in 8 bits."""

    def _take(self, weight: Weight) -> None:
        if weight.block[1] >= weight.num_inputs:
            weight = by_output(weight)
        assert weight.scale is not None
        weight = replace(weight, data=weight.data.contiguous(), scale=weight.scale.float().contiguous())
        self._product = Product(weight, self._bias, is_gated=self._is_gated)
        self._few = self._product
        if self._norm is not None:
            self._few = Product(weight, self._bias, self._norm.eps, self._is_gated, self._norm.weight)
        self._library = None if self._device.is_invariant else library_product(weight, self._device.torch_device)
        self._library_scale: torch.Tensor | None = None
        if self._library is not None:
            assert weight.scale is not None
            self._library_scale = prepared_scale(self._library, weight.scale)
        self._most_exact_rows = 0 if self._device.is_invariant else most_exact_rows_of_fp8(self._product)
        self._tunings: dict[int, Tuning] = {}
        for num_rows in range(1, most_own_rows_of_fp8(self._product, self._device) + 1):
            self._tunings[num_rows] = tuning = tune_fp8(num_rows, self._product, self._device)
            self._workspace.reserve(partial_floats(num_rows, self._product, tuning))

    def _computed(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        num_rows, product = len(x), self._product
        tuning = self._tunings.get(num_rows)
        if tuning is not None and num_rows <= self._most_exact_rows:
            return project(x, self._few, residual, tuning, self._device, self._workspace)
        block = min(product.weight.block[1], product.num_inputs)
        tokens = quantize_tokens(x, block, self._device, self._norm)
        if tuning is None and (self._library is None or x.dtype != torch.bfloat16):
            tuning = tune_fp8(num_rows, product, self._device)
        if tuning is not None:
            arguments = product, residual, tuning, self._device, self._workspace, x.dtype, None, tokens.scale
            return project(tokens.tokens, *arguments)
        assert self._library is not None
        assert self._library_scale is not None
        y = self._library(tokens, product.weight.data, self._library_scale)[:num_rows]
        return self._finished(y, residual)


class Int4Projection(QuantizedProjection):
    """A product with a weight of 4 bits."""

    def _take(self, weight: Weight) -> None:
        self._product = Int4Product(pack(weight, 2 if self._is_gated else 1), self._bias, self._is_gated)
        self._tunings: dict[int, Int4Tuning] = {}
        for num_rows in range(1, MAX_OWN_ROWS_OF_INT4 + 1):
            self._tunings[num_rows] = tuning = tune_int4(num_rows, self._product, self._device)
            self._workspace.reserve(int4_partial_floats(num_rows, self._product, tuning))

    def _computed(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        num_rows, product, weight = len(x), self._product, self._product.weight
        tuning = self._tunings.get(num_rows)
        if self._norm is not None:
            x = rms_norm(x, self._norm.weight, self._norm.eps, self._device)
        if weight.order is not None:
            x = x.index_select(1, weight.order)
        if tuning is not None:
            return project_int4(x, product, residual, tuning, self._device, self._workspace)
        if self._device.is_invariant:
            most, where = MAX_OWN_ROWS_OF_INT4, (self._device, self._workspace)
            before = [None] * triton.cdiv(num_rows, most) if residual is None else residual.split(most)
            pieces = zip(x.split(most), before, strict=True)
            return torch.cat(
                [project_int4(rows, product, of_rows, self._tunings[len(rows)], *where) for rows, of_rows in pieces]
            )
        y = torch.empty(num_rows, weight.num_outputs, dtype=x.dtype, device=x.device)
        part_outputs = weight.num_outputs // weight.num_parts
        for part in range(weight.num_parts):
            for first in range(0, part_outputs, _PIECE_OUTPUTS):
                count = min(_PIECE_OUTPUTS, part_outputs - first)
                padded = triton.cdiv(count, 64) * 64
                matrix = dequantized_int4(weight, part * weight.padded_outputs + first, padded, x.dtype, self._device)
                begin = part * part_outputs + first
                torch.mm(x, matrix[:count].t(), out=y[:, begin : begin + count])
        return self._finished(y, residual)

"""Chooses how a product is computed, by its rows and shape. Figures: docs/design/0130-products-of-few-rows.md.

The library (cuBLAS) reads weights at about 80 % of the memory's rate when rows are few, and takes 5 us however small
the weight; from some number of rows on it is compute that counts, and cuBLAS is better at that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

from raypp.ops.cuda.int4_products import Int4Product, Int4Tuning, int4_shared_bytes
from raypp.ops.cuda.kernel_launch import Device
from raypp.ops.cuda.projection import FEW_ROWS, Product, Tuning, shared_bytes

MAX_ROWS = 64
"""With more rows, the library computes."""

_FEW_ROWS_OF_INT4 = 16
"""Up to so many rows, a program has little to multiply, and its rounds may be longer."""

MAX_ROWS_IN_8_BITS = 64
"""With more rows, the library multiplies the weights that were not rounded."""

_SMALL_WEIGHT_BYTES = 16 << 20
"""With more than 32 rows the library is as fast for weights of this size. For smaller ones its fixed time counts."""

_LARGE_WEIGHT_BYTES = 128 << 20
"""Weights of this size are LM heads: the library's from three rows on, but for those in 8 bits."""

_PIECE = 8192  # elements of the weight with a sum of each, in a program of one row
_PIECE_BYTES = 16 << 10  # of the weight that such a program loads at once
_WHOLE_ROW_BYTES = 8 << 10  # the longest row of the weight that it loads as a whole
_MAX_SPLITS = 4
_USUAL_PROCESSORS = 128
"""For which products are split whose splits depend on their sizes alone."""
_WIDE_PROGRAMS = 96
"""Of 128 outputs and rows, which keep a GPU busy; with fewer, programs are smaller."""


@dataclass(frozen=True)
class OwnProduct:
    """How own kernels compute a product.

    Args:
        product: What they read, without a norm where they do not normalize.
        tuning: How the work is cut.
    """

    product: Product
    tuning: Tuning

    @classmethod
    def of(cls, product: Product, num_rows: int, tuning: Tuning) -> OwnProduct:
        """Return a product that normalizes its input itself where rows are few enough."""
        return cls(product if num_rows <= FEW_ROWS else replace(product, norm_eps=None), tuning)


def input_type_in_8_bits(num_rows: int, *, is_normed: bool = False) -> torch.dtype | None:
    """Return the type that the input x of a product in 8 bits should have; None: the model's.

    Tensor cores take x in 8 bits as well: in the more precise format after a norm, whose root mean square is 1, else in
    the format with float16's range.
    """
    if num_rows > MAX_ROWS_IN_8_BITS:
        return None
    if num_rows <= FEW_ROWS:
        return torch.float16
    return torch.float8_e4m3fn if is_normed else torch.float8_e5m2


def own_product(num_rows: int, product: Product, device: Device) -> OwnProduct | None:
    """Return how own kernels compute a product with so many rows; None where the library is faster."""
    if device.is_invariant:
        return OwnProduct(replace(product, norm_eps=None), tune_invariant(num_rows, product, device))
    tuning = choose_projection(num_rows, product, device)
    return None if tuning is None else OwnProduct.of(product, num_rows, tuning)


def tune_invariant(num_rows: int, product: Product, device: Device) -> Tuning:
    """Return a cut that gives a row the same bits among any others: by tensor cores, along K by its sizes alone.

    Of 128 inputs at a time the first come last, so their number is part of the order, too. How many outputs and rows
    a program has changes no sum, nor whether it sums all parts of K itself, as those with many rows do.
    """
    inputs = min(128, product.weight.block[1]) if product.has_blocks else 128
    num_strips = triton.cdiv(product.num_outputs, 64)
    is_split = not product.is_gated and 2 * num_strips <= _USUAL_PROCESSORS
    num_parts = max(1, min(_MAX_SPLITS, product.num_inputs // (2 * inputs))) if is_split else 1
    if num_rows <= 32 or (num_rows <= MAX_ROWS and not product.is_gated):
        num_stages = 2 if product.is_gated and num_rows <= 16 else 4  # two programs fit on a processor
        tuning = Tuning(64, inputs, num_parts, num_stages=num_stages, least_rows=16)
        most_stages = device.shared_bytes // shared_bytes(num_rows, product, replace(tuning, num_stages=1)) - 1
        return replace(tuning, num_stages=max(1, min(tuning.num_stages, most_stages)))  # the first is kept besides
    num_programs = triton.cdiv(num_strips, 2) * triton.cdiv(num_rows, 128)
    is_in_16_bits = product.weight.scale is None
    tuning = Tuning(64, inputs, num_warps=8 if product.has_blocks else 4, num_stages=4, num_turns=num_parts)
    if product.is_gated:
        tuning = replace(tuning, inputs=64 if is_in_16_bits else inputs, num_stages=3)
    if is_in_16_bits and num_programs >= (4 if product.is_gated else 1) * _WIDE_PROGRAMS:
        tuning = replace(tuning, outputs=128, inputs=64, num_warps=8)
    elif 2 * num_programs < _WIDE_PROGRAMS:
        tuning = replace(tuning, most_rows=64)
    return _fitting(tuning, num_rows, product, device)


def choose_projection(num_rows: int, product: Product, device: Device) -> Tuning | None:
    """Return how own kernels compute a product with so many rows; None where the library is faster."""
    if num_rows == 1:
        return _tune_row(product)
    if num_rows <= FEW_ROWS:
        return _tune_few(product)
    tuning = _tune_strips(num_rows, product, device)
    if tuning is None:
        return None
    return _fitting(tuning, num_rows, product, device)


def _tune_strips(num_rows: int, product: Product, device: Device) -> Tuning | None:
    """Return the cut of a product by tensor cores; None where the library is faster."""
    if product.weight.scale is not None:
        return _tune_rows_in_8_bits(num_rows, product, device) if num_rows <= MAX_ROWS_IN_8_BITS else None
    if product.is_gated:
        return Tuning(outputs=64, inputs=128, num_stages=3) if num_rows <= 8 else None
    if product.weight.data.nbytes >= _LARGE_WEIGHT_BYTES:
        return None
    if num_rows <= 32 or (num_rows <= MAX_ROWS and product.weight.data.nbytes <= _SMALL_WEIGHT_BYTES):
        return _tune_rows(num_rows, product, device)
    return None


def _tune_row(product: Product) -> Tuning:
    """Return the cut for one row: short rows of the weight are loaded as a whole, before the input is there."""
    inputs, element_bytes = triton.next_power_of_2(product.num_inputs), product.weight.data.element_size()
    piece = _PIECE_BYTES // element_bytes
    if inputs * element_bytes > _WHOLE_ROW_BYTES:
        inputs, piece = 4096, _PIECE
    outputs = max(1, piece // inputs // (2 if product.is_gated else 1))
    return Tuning(outputs=min(outputs, 16), inputs=inputs)


def _tune_few(product: Product) -> Tuning:
    """Return the cut for few rows: smaller pieces than for one, since every row has sums of its own."""
    if product.is_gated:
        return Tuning(outputs=8, inputs=256)
    return Tuning(outputs=4, inputs=512 if product.num_inputs >= 4096 else 1024)


def _tune_rows_in_8_bits(num_rows: int, product: Product, device: Device) -> Tuning:
    """Return the cut in 8 bits: strips of at least 64 outputs, wider where there are enough of them.

    Others are split along K until every processor has three programs, for half the bytes of 16 bits take half the
    time; with more than 32 rows, one.
    """
    if product.is_gated:
        return Tuning(outputs=64, inputs=128, num_stages=4)
    num_programs, num_strips = device.num_processors, triton.cdiv(product.num_outputs, 64)
    if num_strips >= 3 * num_programs:
        return Tuning(outputs=128, inputs=128, num_stages=3)
    most = (3 if num_rows <= 32 else 1) * num_programs // num_strips
    num_splits = max(1, min(_MAX_SPLITS, most, product.num_inputs // 512))
    return Tuning(outputs=64, inputs=256, num_splits=num_splits, num_stages=3)


def _tune_rows(num_rows: int, product: Product, device: Device) -> Tuning:
    """Return the cut: strips of 64 outputs, split along K until every processor has a program, with few rows two.

    The parts of a split go through memory, and one program waits for all of them.
    """
    num_programs = device.num_processors
    if num_rows <= 8:
        if product.num_outputs > product.num_inputs:
            return Tuning(outputs=32, inputs=128, num_stages=5)
        num_programs *= 2
    inputs, num_stages = (256, 3) if num_rows <= 16 else (128, 4) if num_rows <= 32 else (128, 3)
    num_pieces = triton.cdiv(product.num_inputs, inputs)
    num_splits = min(_MAX_SPLITS, num_programs // triton.cdiv(product.num_outputs, 64), num_pieces // 2)
    if num_rows <= 16 and product.num_outputs > product.num_inputs:
        num_splits = 1
    return Tuning(outputs=64, inputs=inputs, num_splits=max(1, num_splits), num_stages=num_stages)


def most_exact_rows_of_fp8(product: Product) -> int:
    """Return up to how many rows x stays in 16 bits before a product with a weight in 8 bits.

    Of blocks none does: element by element, their scales cost more than the weight.
    """
    return 0 if product.has_blocks else 1


def most_own_rows_of_fp8(product: Product, device: Device) -> int:
    """Return up to how many rows own kernels multiply a weight in 8 bits with x in 8 bits, if the library can as well.

    Sums by block take registers twice: there they are faster only where the library leaves processors idle.
    """
    leaves_idle = not product.is_gated and 2 * triton.cdiv(product.num_outputs, 64) <= device.num_processors
    return 128 if leaves_idle or not product.has_blocks else 64


def tune_fp8(num_rows: int, product: Product, device: Device) -> Tuning:
    """Return the cut of a product of 8 bits whose x, but for exact rows, has scales of its own."""
    if device.is_invariant:
        return tune_invariant(num_rows, product, device)
    if num_rows <= most_exact_rows_of_fp8(product):
        return _tune_fp8_row(product, device)
    inputs = min(128, product.weight.block[1]) if product.has_blocks else 128
    tile = min(128, int(triton.next_power_of_2(num_rows)))
    if product.is_gated:
        num_warps = 8 if tile == 128 and product.has_blocks else 4
        num_stages = 3 if tile == 64 and product.has_blocks else 4  # two programs fit on a processor
        tuning = Tuning(outputs=64, inputs=inputs, num_warps=num_warps, num_stages=num_stages)
        return _fitting(tuning, num_rows, product, device)
    num_programs = triton.cdiv(product.num_outputs, 64) * triton.cdiv(num_rows, tile)
    per_processor = 3 if num_rows <= 16 else 2 if num_rows <= 64 else 1
    num_splits = per_processor * device.num_processors // num_programs if num_rows <= tile else 1
    num_splits = max(1, min(_MAX_SPLITS, num_splits, product.num_inputs // 512))
    num_stages = 3 if product.has_blocks and num_rows <= 64 else 6 if num_rows <= 32 else 4
    tuning = Tuning(outputs=64, inputs=inputs, num_splits=num_splits, num_stages=num_stages)
    return _fitting(tuning, num_rows, product, device)


def _fitting(tuning: Tuning, num_rows: int, product: Product, device: Device) -> Tuning:
    """Return a cut with no more stages than shared memory holds."""
    most_stages = device.shared_bytes // shared_bytes(num_rows, product, replace(tuning, num_stages=1))
    return replace(tuning, num_stages=max(1, min(tuning.num_stages, most_stages)))


def _tune_fp8_row(product: Product, device: Device) -> Tuning:
    """Return the cut for one row: short pieces where there are programs enough, else rows as a whole if they fit."""
    for outputs in (16, 8):
        is_enough = product.num_outputs >= 2 * outputs * device.num_processors
        if is_enough and (outputs == 16 or product.num_inputs > _WHOLE_ROW_BYTES):
            return Tuning(outputs=outputs, inputs=512)
    return _tune_row(product)


def tune_int4(num_rows: int, product: Int4Product, device: Device) -> Int4Tuning:
    """Return the cut of a product of 4 bits: strips split along K until every processor has two or three programs.

    With few rows, products with as many inputs as outputs or more take two pieces a round: fewer wait for scales.
    """
    most_rows = 64 if product.is_gated else 128
    if device.is_invariant:  # as `tune_invariant`
        strips = triton.cdiv(product.num_outputs, 64)
        num_splits = max(1, min(_MAX_SPLITS, _USUAL_PROCESSORS // strips, product.weight.num_inputs // 512))
        return _with_fitting_stages(Int4Tuning(num_splits=num_splits, most_rows=most_rows), num_rows, product, device)
    num_programs = triton.cdiv(product.num_outputs, 64) * triton.cdiv(num_rows, most_rows)
    num_splits = (3 if num_rows <= 32 else 2) * device.num_processors // num_programs
    num_splits = max(1, min(_MAX_SPLITS, num_splits, product.weight.num_inputs // 512))
    tuning = Int4Tuning(num_splits=num_splits, most_rows=most_rows)
    if num_rows <= _FEW_ROWS_OF_INT4 and product.num_outputs <= product.weight.num_inputs:
        tuning = replace(tuning, pieces=2, num_stages=3)
    return _with_fitting_stages(tuning, num_rows, product, device)


def _with_fitting_stages(tuning: Int4Tuning, num_rows: int, product: Int4Product, device: Device) -> Int4Tuning:
    most_stages = device.shared_bytes // int4_shared_bytes(num_rows, product, replace(tuning, num_stages=1))
    return replace(tuning, num_stages=max(1, min(tuning.num_stages, most_stages)))

"""Products with weights of 4 bits, by tensor cores in the model's type, for any number of rows; also of experts.

Each program multiplies a strip of the weight with a tile of rows of x. A code is expanded in registers: behind the bits
of 128 (bfloat16) or 1024 (float16) its four bits are the last ones of the mantissa, so that what is left is a
subtraction, which is exact. Floats of 4 bits become those of 16 whose exponents have no bias, which is made up for at
the end. Sums of a group of inputs are multiplied by its scale, or the codes are before. The weight lies as
`raypp.ops.cuda.packed_int4` says; strips may be split along K as in `raypp.ops.cuda.projection`.

Twin: `linear` of tests/gpu/reference_ops.py with `Weight.dequantized`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from raypp.ops.backend import SILU, Gate
from raypp.ops.cuda.between_products import as_stored, constants_of, gated
from raypp.ops.cuda.kernel_launch import IS_INTERPRETED, Device, Workspace, fence_shared, finished, start
from raypp.ops.cuda.packed_int4 import FP4_SCALE_EXPONENT, TILE, PackedInt4
from raypp.ops.cuda.projection import load_vector, sums_of_splits
from raypp.ops.cuda.router_kernels import Arranged

_MOST_ROWS_OF_A_TILE = 128
_LEAST_ROWS_OF_A_TILE = 16  # for 8, Triton takes products of a warp, for which codes would move between threads
_SCALE_EXPONENT = tl.constexpr(FP4_SCALE_EXPONENT)

# Four bytes to four low halves and four high halves, each behind the bits of a larger number, which is then subtracted.
_EXPAND = """
{{
.reg .b32 a, b, c, d, e, f;
prmt.b32 a, $4, 0, 0x4140;
prmt.b32 b, $4, 0, 0x4342;
shr.b32 c, a, 4;
shr.b32 d, b, 4;
lop3.b32 a, a, 0x000f000f, {offset}, 0xea;
lop3.b32 b, b, 0x000f000f, {offset}, 0xea;
lop3.b32 c, c, 0x000f000f, {offset}, 0xea;
lop3.b32 d, d, 0x000f000f, {offset}, 0xea;
{end}
}}
"""
_MOVE = "mov.b32 $0, a; mov.b32 $1, b; mov.b32 $2, c; mov.b32 $3, d;"
_SUBTRACT = """
mov.b32 e, {one};
mov.b32 f, {minus};
fma.rn.{type} $0, a, e, f;
fma.rn.{type} $1, b, e, f;
fma.rn.{type} $2, c, e, f;
fma.rn.{type} $3, d, e, f;
"""
_BF16 = _SUBTRACT.format(one="0x3f803f80", minus="0xc308c308", type="bf16x2")  # 136 = 128 + 8
_FP16 = _SUBTRACT.format(one="0x3c003c00", minus="0xe408e408", type="f16x2")  # 1032 = 1024 + 8
_BF16_CENTERED = tl.constexpr(_EXPAND.format(offset="0x43004300", end=_BF16))
_BF16_RAISED = tl.constexpr(_EXPAND.format(offset="0x43004300", end=_MOVE))
_FP16_CENTERED = tl.constexpr(_EXPAND.format(offset="0x64006400", end=_FP16))
_FP16_RAISED = tl.constexpr(_EXPAND.format(offset="0x64006400", end=_MOVE))


# A number of eight bytes to eight pairs of floats, see `FP4_ORDER`: of the low halves four, then of the high ones.
_FLOATS = """
{{
.reg .b32 a, b, c, s, t;
mov.b64 {{a, b}}, $16;
shf.l.wrap.b32 t, b, b, 2;
lop3.b32 c, a, t, 0x60306030, 0xe4;
{pairs}
}}
"""
_TO_PAIR = (
    "mov.b32 t, a;",
    "shl.b32 t, a, 6;",
    "mov.b32 t, b;",
    "shl.b32 t, b, 6;",
    "shf.r.wrap.b32 t, a, a, 4;",
    "shl.b32 t, c, 2;",
    "shf.r.wrap.b32 t, b, b, 4;",
    "shf.l.wrap.b32 t, c, c, 8;",
)
_TO_FP16 = "and.b32 s, t, 0x80008000; shl.b32 t, t, 3; lop3.b32 t, t, 0x0e000e00, s, 0xea;"


def _floats(further: str = "") -> str:
    """Return the instructions that make 16 floats of a number."""
    pairs = (
        f"{step} and.b32 t, t, 0x81c081c0; {further} mov.b32 {{${2 * i}, ${2 * i + 1}}}, t;"
        for i, step in enumerate(_TO_PAIR)
    )
    return _FLOATS.format(pairs="\n".join(pairs))


_BF16_FLOATS, _FP16_FLOATS = tl.constexpr(_floats()), tl.constexpr(_floats(_TO_FP16))
_REGISTERS = tl.constexpr(",".join(["=h"] * 16 + ["l"]))
_BF16S, _FP16S = tl.constexpr((tl.bfloat16,) * 16), tl.constexpr((tl.float16,) * 16)


@dataclass(frozen=True, eq=False)
class Int4Product:
    """What a product needs. N outputs, K inputs."""

    weight: PackedInt4  # with a gate 2 N outputs in two parts
    bias: torch.Tensor | None = None  # [N], with a gate [2 N]; of experts [E, N] or [E, 2 N]
    is_gated: bool = False
    gate: Gate = SILU  # between the two parts, if there is one

    @property
    def num_outputs(self) -> int:
        """N."""
        return self.weight.num_outputs // (2 if self.is_gated else 1)


@dataclass(frozen=True)
class Int4Tuning:
    """How the work is cut.

    Args:
        strips: Of 64 outputs, that a program multiplies at once: 1, or 2.
        num_splits: Parts of K.
        num_warps: Of a program: 4 or 8.
        num_stages: Pieces of the weight under way from memory.
        most_rows: Of a tile.
        pieces: Of up to 128 inputs in a round, at whose beginning the next one's scales are asked for.
        folds: Whether codes are multiplied by their scales before the product, not sums after it. FP4 has its own way.
    """

    strips: int = 1
    num_splits: int = 1
    num_warps: int = 4
    num_stages: int = 4
    most_rows: int = _MOST_ROWS_OF_A_TILE
    pieces: int = 1
    folds: bool = False


def int4_partial_floats(num_rows: int, product: Int4Product, tuning: Int4Tuning) -> int:
    """Return how many floats of the workspace `project_int4` needs."""
    if tuning.num_splits == 1:
        return 0
    padded, weight = _padded(num_rows, tuning), product.weight
    num_rows = int(triton.cdiv(num_rows, padded)) * padded
    return weight.padded_outputs * weight.num_parts * tuning.num_splits * num_rows


def int4_shared_bytes(num_rows: int, product: Int4Product, tuning: Int4Tuning) -> int:
    """Return the shared memory of a program, or a little more."""
    tiles = tiles_of_piece(product.weight)
    of_codes = 2048 * tiles * tuning.strips * (2 if product.is_gated else 1)
    of_x = _padded(num_rows, tuning) * TILE * tiles * 2
    return (of_codes + of_x) * tuning.pieces * tuning.num_stages


def project_int4(
    x: torch.Tensor,
    product: Int4Product,
    residual: torch.Tensor | None,
    tuning: Int4Tuning,
    device: Device,
    workspace: Workspace,
) -> torch.Tensor:
    """Return x W^T + b, its gate, or its sum with the residual stream, [T, N], of x's type.

    Shapes: x [T, K] contiguous, in the weight's order; residual [T, N], left as it is.
    """
    num_rows = len(x)
    y = torch.empty(num_rows, product.num_outputs, dtype=x.dtype, device=x.device)
    padded = _padded(num_rows, tuning)
    assert int4_partial_floats(num_rows, product, tuning) <= workspace.floats.numel(), "not reserved"
    partial, counters = workspace.floats, workspace.counters
    _launch(x, product, residual, y, padded, triton.cdiv(num_rows, padded), tuning, device, partial, counters)
    return y


def project_int4_of_experts(
    x: torch.Tensor,
    product: Int4Product,
    arranged: Arranged,
    num_chosen: int,
    tuning: Int4Tuning,
    device: Device,
    workspace: Workspace,
) -> torch.Tensor:
    """Return each pair's product with its expert, [T * k, N].

    Shapes: of a product with a gate, x [T, K], and the result is in the order of `arranged.pairs`; of one without, x
    [T * k, K] is in that order, and the result in that of the pairs' numbers.
    """
    y = torch.empty(len(arranged.pairs), product.num_outputs, dtype=x.dtype, device=x.device)
    num_row_tiles, partial = arranged.tiles.shape[1], y
    if tuning.num_splits > 1:  # of few pairs
        weight, rows = product.weight, arranged.tile_rows * num_row_tiles * tuning.num_splits
        assert num_row_tiles * triton.cdiv(product.num_outputs, TILE) <= workspace.counters.numel()
        partial = torch.empty(weight.padded_outputs * weight.num_parts * rows, dtype=torch.float32, device=x.device)
    tiles, counters = (arranged.tile_rows, num_row_tiles), workspace.counters
    _launch(x, product, None, y, *tiles, tuning, device, partial, counters, arranged, num_chosen)
    return y


def _launch(
    x: torch.Tensor,
    product: Int4Product,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    padded: int,
    num_row_tiles: int,
    tuning: Int4Tuning,
    device: Device,
    partial: torch.Tensor,
    counters: torch.Tensor,
    arranged: Arranged | None = None,
    num_chosen: int = 1,
) -> None:
    weight, num_outputs = product.weight, product.num_outputs
    num_tiles, tiles = weight.codes.shape[1], tiles_of_piece(weight)
    options: dict[str, Any] = {"num_warps": tuning.num_warps, "num_stages": tuning.num_stages}
    _project_int4[(triton.cdiv(num_outputs, TILE * tuning.strips), tuning.num_splits, num_row_tiles)](
        x,
        weight.codes,
        weight.scale,
        weight.scale if weight.zero is None else weight.zero,
        x if product.bias is None else product.bias,
        x if residual is None else residual,
        y,
        num_outputs,
        weight.num_inputs,
        weight.padded_outputs,
        num_tiles,
        weight.scale.shape[1],
        partial,
        counters,
        len(x),
        x if arranged is None else arranged.pairs,
        x if arranged is None else arranged.tiles,
        HAS_EXPERTS=arranged is not None,
        CHOSEN=num_chosen,
        **constants_of(product.gate),
        HAS_ZERO=weight.zero is not None,
        IS_FP4=weight.is_fp4,
        HAS_GATE=product.is_gated,
        HAS_BIAS=product.bias is not None,
        HAS_RESIDUAL=residual is not None,
        IS_EVEN=weight.num_inputs % (TILE * tiles * tuning.pieces) == 0,
        GROUP=weight.group,
        CLAMPS=x.dtype == torch.float16,
        OVERLAPS=device.has_dependent_launch,
        ROWS=padded,
        STRIPS=tuning.strips,
        TILES=tiles,
        SPLITS=tuning.num_splits,
        PIECES=tuning.pieces,
        FOLDS=x.dtype != torch.float16 if weight.is_fp4 else tuning.folds,
        **options,
        **device.launch_options,
    )


def tiles_of_piece(weight: PackedInt4) -> int:
    """Return how many tiles are multiplied at once: of up to 128 inputs that share a scale."""
    return 2 if weight.group % (2 * TILE) == 0 else 1


def _padded(num_rows: int, tuning: Int4Tuning) -> int:
    """Return the rows of a tile."""
    return min(tuning.most_rows, max(_LEAST_ROWS_OF_A_TILE, int(triton.next_power_of_2(num_rows))))


@triton.jit
def _interpreted_fp4(words, dtype: tl.constexpr):
    """Return the 16 floats of each number by the steps of `_FLOATS`, with their bias: there are no subnormal ones."""
    MASK: tl.constexpr = 0x81C081C0
    a, b = (words & 0xFFFFFFFF).to(tl.uint32), ((words >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c = (a & 0x60306030) | (((b << 2) | (b >> 30)) & 0x9FCF9FCF)
    pairs = a, a << 6, b, b << 6, (a >> 4) | (a << 28), c << 2, (b >> 4) | (b << 28), (c << 8) | (c >> 24)
    values = ()
    for pair in tl.static_range(8):
        both = pairs[pair] & MASK
        for number in tl.static_range(2):
            bits = both << 16 if number == 0 else both & 0xFFFF0000
            values += ((bits.to(tl.float32, bitcast=True) * 2.0**126).to(dtype),)
    return values


@triton.jit
def _joined(v, i: tl.constexpr):
    """Return eight of each number's floats, from the i-th on, in the order of its bytes. Shapes: v [n] each; [8 n]."""
    of_first = tl.join(tl.join(v[i], v[i + 4]), tl.join(v[i + 2], v[i + 6]))  # of two inputs the first
    of_second = tl.join(tl.join(v[i + 1], v[i + 5]), tl.join(v[i + 3], v[i + 7]))
    return tl.reshape(tl.join(of_first, of_second), (8 * v[0].numel,))


@triton.jit
def _expanded_fp4(words, dtype: tl.constexpr):
    """Return what `expanded` returns, of floats."""
    if IS_INTERPRETED:
        values = _interpreted_fp4(words, dtype)
    elif dtype == tl.float16:
        values = tl.inline_asm_elementwise(_FP16_FLOATS, _REGISTERS, [words], _FP16S, is_pure=True, pack=1)
    else:
        tl.static_assert(dtype == tl.bfloat16, "products of 4 bits are in bfloat16 or float16")
        values = tl.inline_asm_elementwise(_BF16_FLOATS, _REGISTERS, [words], _BF16S, is_pure=True, pack=1)
    return _joined(values, 0), _joined(values, 8)


@triton.jit
def expanded(codes, dtype: tl.constexpr, IS_CENTERED: tl.constexpr, IS_FP4: tl.constexpr):
    """Return the low and the high halves of bytes: integers less 8, or else plus the offset of `dtype`, or floats.

    Floats are of int64, of eight bytes each, and lack the bias of an exponent, see `_unit`.
    """
    if IS_FP4:
        halves = _expanded_fp4(codes, dtype)
    elif IS_INTERPRETED:
        offset: tl.constexpr = -8 if IS_CENTERED else 1024 if dtype == tl.float16 else 128
        halves = ((codes & 15).to(dtype) + offset).to(dtype), ((codes >> 4).to(dtype) + offset).to(dtype)
    elif dtype == tl.float16:
        half: tl.constexpr = _FP16_CENTERED if IS_CENTERED else _FP16_RAISED
        halves = tl.inline_asm_elementwise(
            half, "=r,=r,=r,=r,r", [codes], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    else:
        tl.static_assert(dtype == tl.bfloat16, "products of 4 bits are in bfloat16 or float16")
        asm: tl.constexpr = _BF16_CENTERED if IS_CENTERED else _BF16_RAISED
        halves = tl.inline_asm_elementwise(
            asm, "=r,=r,=r,=r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    return halves


@triton.jit
def _unit(dtype: tl.constexpr, IS_FP4: tl.constexpr):
    """Return what sums of codes times scales are multiplied by: for floats, what both were changed by."""
    BIAS: tl.constexpr = 0 if IS_INTERPRETED else 14 if dtype == tl.float16 else 126
    return 2.0 ** (BIAS - _SCALE_EXPONENT) if IS_FP4 else 1.0


@triton.jit
def _matrix(bytes_of_tiles, TILES: tl.constexpr, STRIPS: tl.constexpr):
    """Return one half of each byte as an operand, [64 STRIPS, 32 TILES]."""
    # tile, strip, warp, output mod 8, input / 2 mod 4, step, half of the step, output / 8 mod 2, input
    digits = tl.reshape(bytes_of_tiles, (TILES, STRIPS, 4, 8, 4, 2, 2, 2, 2))
    digits = tl.permute(digits, (1, 2, 7, 3, 0, 5, 6, 4, 8))
    return tl.reshape(digits, (64 * STRIPS, 32 * TILES))


@triton.jit
def _side_by_side(low, high):
    """Return both halves as one operand, [n, 64 TILES]. Shapes: low and high [n, 32 TILES]."""
    TILES: tl.constexpr = low.shape[1] // 32
    halves = tl.permute(tl.reshape(tl.join(low, high), (low.shape[0], TILES, 32, 2)), (0, 1, 3, 2))
    return tl.reshape(halves, (low.shape[0], 64 * TILES))


@triton.jit
def _multiplied(
    total,
    codes,
    x,
    scale,
    zero,
    HAS_ZERO: tl.constexpr,
    IS_FP4: tl.constexpr,
    FOLDS: tl.constexpr,
    TILES: tl.constexpr,
    STRIPS: tl.constexpr,
):
    """Return a total with the products of one more piece.

    Scale and zero are those of the piece's outputs, or a pair: of low and of high halves. So is x, see `_rows`.
    """
    LAST: tl.constexpr = len(scale) - 1
    dtype: tl.constexpr = x[0].dtype
    low, high = expanded(codes, dtype, not HAS_ZERO, IS_FP4)
    low, high = _matrix(low, TILES, STRIPS), _matrix(high, TILES, STRIPS)
    if HAS_ZERO:
        offset: tl.constexpr = 1024 if dtype == tl.float16 else 128
        low -= (zero[0].to(tl.float32) + offset).to(dtype)[:, None]
        high -= (zero[LAST].to(tl.float32) + offset).to(dtype)[:, None]
    if FOLDS:
        low, high = low * scale[0].to(dtype)[:, None], high * scale[LAST].to(dtype)[:, None]
        total = finished(tl.dot(_side_by_side(low, high), tl.trans(x[0]), total))
    elif LAST == 0:
        total += tl.dot(_side_by_side(low, high), tl.trans(x[0])) * scale[0].to(tl.float32)[:, None]
    else:
        total += tl.dot(low, tl.trans(x[0])) * scale[0].to(tl.float32)[:, None]
        total += tl.dot(high, tl.trans(x[1])) * scale[1].to(tl.float32)[:, None]
    return total


@triton.jit
def _fetched(by_group, tile, num_groups, stride, IS_THERE: tl.constexpr, GROUP: tl.constexpr, STRIPS: tl.constexpr):
    """Return the scales or zeros of a piece's outputs: one vector, or one of low and one of high halves.

    They stay as they are stored: a conversion would wait for them.
    """
    if not IS_THERE:
        found = ()
    elif GROUP == 32:
        low, high = tl.minimum(2 * tile, num_groups - 1), tl.minimum(2 * tile + 1, num_groups - 1)
        found = _of_outputs(by_group + low * stride, STRIPS), _of_outputs(by_group + high * stride, STRIPS)
    else:
        found = (_of_outputs(by_group + tl.minimum(tile * 64 // GROUP, num_groups - 1) * stride, STRIPS),)
    return found


@triton.jit
def _of_outputs(by_output, STRIPS: tl.constexpr):
    """Return what lies at pointers and, with two strips, 64 further.

    Two loads, since values of which each thread loads one would have to be moved to those that multiply by them.
    """
    found = tl.load(by_output)
    if STRIPS == 2:
        found = tl.reshape(tl.permute(tl.join(found, tl.load(by_output + 64)), (1, 0)), (128,))
    return found


@triton.jit
def _all_fetched(
    by_group,
    tile,
    num_groups,
    stride,
    IS_THERE: tl.constexpr,
    GROUP: tl.constexpr,
    TILES: tl.constexpr,
    STRIPS: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Return what `_fetched` returns for some pieces, one after the other."""
    found = ()
    for piece in tl.static_range(PIECES):
        found += _fetched(by_group, tile + piece * TILES, num_groups, stride, IS_THERE, GROUP, STRIPS)
    return found


@triton.jit
def _of_piece(found, piece: tl.constexpr, PIECES: tl.constexpr):
    """Return one piece's part of what was fetched for some."""
    COUNT: tl.constexpr = len(found) // PIECES
    part = ()
    for index in tl.static_range(COUNT):
        part += (found[piece * COUNT + index],)
    return part


@triton.jit
def _rows(x, first, is_row, num_inputs, TILES: tl.constexpr, HAS_HALVES: tl.constexpr, IS_EVEN: tl.constexpr):
    """Return a piece of a tile of x from an input on, as one matrix or as two, zeros past its rows.

    Two where halves of bytes have scales of their own, which sums are multiplied by: 32 inputs each. Past the end
    nothing is read: many programs read x, and one row again and again is slow. Shapes: x [ROWS, 1] pointers; is_row
    alike.
    """
    index = tl.arange(0, 32 if HAS_HALVES else 64 * TILES)
    found = ()
    for half in tl.static_range(2 if HAS_HALVES else 1):
        column = first + 32 * half + index
        inside = is_row if IS_EVEN else is_row & (column < num_inputs)[None, :]
        found += (tl.load(x + column[None, :], mask=inside, other=0.0),)
    return found


@triton.jit(do_not_specialize=["num_rows"])  # one kernel for all that fit a tile
def _project_int4(
    x,
    codes,
    scale,
    zero,
    bias,
    residual,
    y,
    num_outputs,
    num_inputs,
    padded_outputs,
    num_tiles,
    num_groups,
    partial,
    counters,
    num_rows,
    pairs,
    row_tiles,
    HAS_EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    CUBIC: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    IS_FP4: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_EVEN: tl.constexpr,
    GROUP: tl.constexpr,
    CLAMPS: tl.constexpr,
    OVERLAPS: tl.constexpr,
    ROWS: tl.constexpr,
    STRIPS: tl.constexpr,
    TILES: tl.constexpr,
    SPLITS: tl.constexpr,
    PIECES: tl.constexpr,
    FOLDS: tl.constexpr,
):
    strip, split = tl.program_id(0), tl.program_id(1)
    NUMBERS: tl.constexpr = 256 if IS_FP4 else 2048  # of a tile
    SIZE: tl.constexpr = TILES * STRIPS * NUMBERS
    stride = padded_outputs * (2 if HAS_GATE else 1)  # of scales and zeros
    row, expert = tl.arange(0, ROWS), 0
    if HAS_EXPERTS:
        if HAS_GATE:
            start(OVERLAPS)
        tile, count = tl.program_id(2), tl.num_programs(2)  # what `down` reads, the launch before the last wrote
        expert = tl.load(row_tiles + tile, cache_modifier=".cg")
        first_row = tl.load(row_tiles + count + tile, cache_modifier=".cg")
        num_rows = tl.where(expert < 0, 0, tl.load(row_tiles + 2 * count + tile, cache_modifier=".cg"))
        expert = tl.maximum(expert, 0)
        place = first_row + tl.minimum(row, tl.maximum(num_rows, 1) - 1)
        pair = tl.load(pairs + place, mask=row < num_rows, other=0, cache_modifier=".cg")
        x_row = (pair // CHOSEN if HAS_GATE else place).to(tl.int64)
        y_row = (place if HAS_GATE else pair).to(tl.int64)
        codes += expert.to(tl.int64) * (stride // 64) * (num_tiles * NUMBERS)
        scale += expert.to(tl.int64) * stride * num_groups
        zero += expert.to(tl.int64) * stride * num_groups
        bias += expert.to(tl.int64) * num_outputs * (2 if HAS_GATE else 1)
    else:
        x_row = (tl.program_id(2) * ROWS + row).to(tl.int64)
        y_row = x_row
        num_rows -= tl.program_id(2) * ROWS
    output = strip * (64 * STRIPS) + tl.arange(0, 64 * STRIPS)
    place = tl.arange(0, SIZE)  # tile, strip, number
    place = place // (NUMBERS * STRIPS) * NUMBERS + place // NUMBERS % STRIPS * (num_tiles * NUMBERS) + place % NUMBERS
    tiles = codes + (strip * STRIPS).to(tl.int64) * (num_tiles * NUMBERS) + place
    up_tiles = tiles + (padded_outputs // 64).to(tl.int64) * (num_tiles * NUMBERS)
    scale += strip * (64 * STRIPS) + tl.arange(0, 64)
    zero += strip * (64 * STRIPS) + tl.arange(0, 64)
    up_scale, up_zero = scale + padded_outputs, zero + padded_outputs
    HAS_HALVES: tl.constexpr = GROUP == 32 and not FOLDS
    x_rows, is_row = x + x_row[:, None] * num_inputs, (row < num_rows)[:, None]
    split_tiles = tl.cdiv(tl.cdiv(num_tiles, TILES * PIECES), SPLITS) * (TILES * PIECES)
    first = split * split_tiles
    last = tl.minimum(first + split_tiles, num_tiles)
    if HAS_EXPERTS:
        last = tl.where(num_rows > 0, last, first)  # a tile that there is not
    total = tl.zeros((64 * STRIPS, ROWS), tl.float32)
    up_total = total
    addend = load_vector(bias, output, num_outputs, HAS_BIAS)
    up_addend = addend
    # Scales are loaded one round ahead here: the compiler does that for the codes alone.
    scales = _all_fetched(scale, first, num_groups, stride, True, GROUP, TILES, STRIPS, PIECES)
    zeros = _all_fetched(zero, first, num_groups, stride, HAS_ZERO, GROUP, TILES, STRIPS, PIECES)
    up_scales, up_zeros = scales, zeros
    if HAS_GATE:
        up_addend = load_vector(bias, num_outputs + output, 2 * num_outputs, HAS_BIAS)
        up_scales = _all_fetched(up_scale, first, num_groups, stride, True, GROUP, TILES, STRIPS, PIECES)
        up_zeros = _all_fetched(up_zero, first, num_groups, stride, HAS_ZERO, GROUP, TILES, STRIPS, PIECES)
    if not (HAS_EXPERTS and HAS_GATE):
        start(OVERLAPS)
    y_cell = y_row[:, None] * num_outputs + output[None, :]
    in_y = (row < num_rows)[:, None] & (output < num_outputs)[None, :]
    before = tl.zeros((ROWS, 64 * STRIPS), tl.float32)
    if HAS_RESIDUAL and ROWS <= 32:  # now, not at the end, so that its latency is hidden, if registers hold it
        before = tl.load(residual + y_cell, mask=in_y, other=0.0).to(tl.float32)
    for begin in range(first, last, TILES * PIECES):
        later = begin + TILES * PIECES
        next_scales = _all_fetched(scale, later, num_groups, stride, True, GROUP, TILES, STRIPS, PIECES)
        next_zeros = _all_fetched(zero, later, num_groups, stride, HAS_ZERO, GROUP, TILES, STRIPS, PIECES)
        if HAS_GATE:
            next_up_scales = _all_fetched(up_scale, later, num_groups, stride, True, GROUP, TILES, STRIPS, PIECES)
            next_up_zeros = _all_fetched(up_zero, later, num_groups, stride, HAS_ZERO, GROUP, TILES, STRIPS, PIECES)
        for index in tl.static_range(PIECES):
            tile = begin + index * TILES
            piece_of_x = _rows(x_rows, tile * 64, is_row, num_inputs, TILES, HAS_HALVES, IS_EVEN)
            if PIECES > 1:
                tile = tl.minimum(tile, num_tiles - TILES)  # past the end x is zero
            piece = tl.load(tiles + tile * NUMBERS)
            fence_shared(OVERLAPS)
            by_output, by_zero = _of_piece(scales, index, PIECES), _of_piece(zeros, index, PIECES)
            total = _multiplied(total, piece, piece_of_x, by_output, by_zero, HAS_ZERO, IS_FP4, FOLDS, TILES, STRIPS)
            if HAS_GATE:
                piece = tl.load(up_tiles + tile * NUMBERS)
                by_up, by_zero = _of_piece(up_scales, index, PIECES), _of_piece(up_zeros, index, PIECES)
                up_total = _multiplied(
                    up_total, piece, piece_of_x, by_up, by_zero, HAS_ZERO, IS_FP4, FOLDS, TILES, STRIPS
                )
        scales, zeros = next_scales, next_zeros
        if HAS_GATE:
            up_scales, up_zeros = next_up_scales, next_up_zeros
    if HAS_GATE:
        totals, is_last = sums_of_splits((tl.trans(total), tl.trans(up_total)), partial, counters, SPLITS, num_rows)
    else:
        totals, is_last = sums_of_splits((tl.trans(total),), partial, counters, SPLITS, num_rows)
    if is_last:
        if HAS_RESIDUAL and ROWS > 32:
            before = tl.load(residual + y_cell, mask=in_y, other=0.0).to(tl.float32)
        unit = _unit(x.dtype.element_ty, IS_FP4)
        result = totals[0] * unit + addend[None, :]
        if HAS_GATE:
            result = gated(result, totals[1] * unit + up_addend[None, :], ALPHA, LIMIT, OFFSET, CUBIC)
        tl.store(y + y_cell, as_stored(result + before, y, CLAMPS), mask=in_y)


def dequantized_int4(weight: PackedInt4, first: int, num_rows: int, dtype: torch.dtype, device: Device) -> torch.Tensor:
    """Return rows of the padded weight, [num_rows, K], its inputs in its own order.

    `first` and `num_rows` are multiples of 64.
    """
    matrix = torch.empty(num_rows, weight.num_inputs, dtype=dtype, device=device.torch_device)
    tiles = tiles_of_piece(weight)
    num_tiles = weight.codes.shape[1]
    _dequantize_int4[(num_rows // TILE, num_tiles // tiles)](
        weight.codes,
        weight.scale,
        weight.scale if weight.zero is None else weight.zero,
        matrix,
        first // TILE,
        weight.num_inputs,
        weight.scale.shape[2],
        num_tiles,
        weight.scale.shape[1],
        HAS_ZERO=weight.zero is not None,
        IS_FP4=weight.is_fp4,
        GROUP=weight.group,
        TILES=tiles,
        OVERLAPS=device.has_dependent_launch,
        **device.launch_options,
    )
    return matrix


@triton.jit
def _dequantize_int4(
    codes,
    scale,
    zero,
    matrix,
    first_strip,
    num_inputs,
    stride,
    num_tiles,
    num_groups,
    HAS_ZERO: tl.constexpr,
    IS_FP4: tl.constexpr,
    GROUP: tl.constexpr,
    TILES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    dtype: tl.constexpr = matrix.dtype.element_ty
    strip, tile = tl.program_id(0), tl.program_id(1) * TILES
    output = (first_strip + strip) * 64 + tl.arange(0, 64)
    SIZE: tl.constexpr = 256 if IS_FP4 else 2048
    piece = tl.load(codes + ((first_strip + strip).to(tl.int64) * num_tiles + tile) * SIZE + tl.arange(0, TILES * SIZE))
    by_output = _fetched(scale + output, tile, num_groups, stride, True, GROUP, 1)
    by_zero = _fetched(zero + output, tile, num_groups, stride, HAS_ZERO, GROUP, 1)
    LAST: tl.constexpr = len(by_output) - 1
    start(OVERLAPS)  # what is written here, earlier kernels may read
    low, high = expanded(piece, dtype, not HAS_ZERO, IS_FP4)
    low, high = _matrix(low, TILES, 1), _matrix(high, TILES, 1)
    if HAS_ZERO:
        offset: tl.constexpr = 1024 if dtype == tl.float16 else 128
        low -= (by_zero[0].to(tl.float32) + offset).to(dtype)[:, None]
        high -= (by_zero[LAST].to(tl.float32) + offset).to(dtype)[:, None]
    index = tl.arange(0, 32 * TILES)
    column = tile * 64 + index // 32 * 64 + index % 32
    cell = matrix + (strip * 64 + tl.arange(0, 64)).to(tl.int64)[:, None] * num_inputs
    unit = _unit(dtype, IS_FP4)
    low = (low.to(tl.float32) * by_output[0].to(tl.float32)[:, None] * unit).to(dtype)
    high = (high.to(tl.float32) * by_output[LAST].to(tl.float32)[:, None] * unit).to(dtype)
    tl.store(cell + column[None, :], low, mask=(column < num_inputs)[None, :])
    tl.store(cell + 32 + column[None, :], high, mask=(column + 32 < num_inputs)[None, :])

"""Functions for kernels that find the threshold of a truncated row bit by bit. Twin: `raypp.ops.sample.truncation`.

Logits are turned into integers of the same order. The threshold is the highest integer that enough tokens reach, or
tokens of enough weight.
"""

from __future__ import annotations

import triton
import triton.language as tl

from raypp.ops.sample import truncation as twin

_HIGHEST_BIT = tl.constexpr(1 << 31)
_FIRST_UNIT = tl.constexpr(1 << 30)
_FRACTION_BITS = tl.constexpr(twin.FRACTION_BITS)
_FRACTION = tl.constexpr((1 << twin.FRACTION_BITS) - 1)
_TO_32_BITS = tl.constexpr(32 - twin.FRACTION_BITS)
_LOG2_E = tl.constexpr(twin.LOG2_E)
_LEAST_EXPONENT = tl.constexpr(twin.LEAST_EXPONENT)
_ONE = tl.constexpr(1 << twin.POWER_BITS)
_SHIFT = tl.constexpr(twin.WEIGHT_BITS - twin.POWER_BITS)
_POWER_1, _POWER_2, _POWER_3, _POWER_4, _POWER_5 = (tl.constexpr(value) for value in twin.POWER_OF_TWO)


@triton.jit
def logits_of(row, logits, changed, is_changed, vocab_size, HAS_CHANGED: tl.constexpr):
    """Return where a row's logits begin: the model's own, or the changed ones where it has some."""
    own = logits + row.to(tl.int64) * vocab_size
    if HAS_CHANGED:
        return tl.where(tl.load(is_changed + row) != 0, changed + row.to(tl.int64) * vocab_size, own)
    return own


@triton.jit
def load_logits(of_row, token, vocab_size):
    """Return a row's logits of some tokens, float32: -inf behind the vocabulary, infinity for NaN."""
    value = tl.load(of_row + token, mask=token < vocab_size, other=-float("inf")).to(tl.float32)
    return tl.where(value != value, float("inf"), value)


@triton.jit
def weights(values, highest, scale):
    """Return each token's weight, int64; all of it in integers, as the twin has it."""
    exponent = tl.maximum((values - highest) * scale, _LEAST_EXPONENT).to(tl.int32)
    fraction = ((exponent & _FRACTION) << _TO_32_BITS).to(tl.uint32, bitcast=True)
    power = tl.umulhi(tl.full(fraction.shape, _POWER_5, tl.uint32), fraction) + _POWER_4
    power = tl.umulhi(power, fraction) + _POWER_3
    power = tl.umulhi(power, fraction) + _POWER_2
    power = tl.umulhi(power, fraction) + _POWER_1
    power = (tl.umulhi(power, fraction) + _ONE).to(tl.int64)
    shift = ((exponent >> _FRACTION_BITS) + _SHIFT).to(tl.int64)
    return tl.where(shift >= 0, power << tl.maximum(shift, 0), power >> tl.minimum(tl.maximum(-shift, 0), 63))


@triton.jit
def scale_of(temperature):
    """Return what turns a difference of logits into its power of two."""
    return tl.div_rn(tl.full((), _LOG2_E, tl.float32), temperature)


@triton.jit
def sortable_of(values):
    """Return integers in the order of the values, uint32. 0 and -0 are equal."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def value_of(sortable):
    """Return the value of such an integer."""
    bits = (sortable ^ 0x80000000).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def least_of_vector(sortable, amounts, wanted):
    """Return the highest integer that tokens reach whose amounts sum to at least `wanted`. Shapes: both [N]."""
    least, bit = tl.full((), 0, tl.uint32), tl.full((), _HIGHEST_BIT, tl.uint32)
    for _pass in range(32):
        higher = least | bit
        reaching = tl.sum(tl.where(sortable >= higher, amounts, 0), 0)
        least = tl.where(reaching.to(tl.float64) >= wanted, higher, least)
        bit = bit >> 1
    return least


@triton.jit
def _amounts(values, token, vocab_size, row_highest, scale, COUNTS: tl.constexpr):
    """Return what `_least_of_row` sums: 1 for each token of the vocabulary, or its weight."""
    if COUNTS:
        return (token < vocab_size).to(tl.int64)
    return weights(values, row_highest, scale)


@triton.jit
def amount_of_row(of_row, vocab_size, row_highest, scale, least, TILE: tl.constexpr):
    """Return the weight of a row's tokens that reach an integer."""
    offset = tl.arange(0, TILE)
    amount = tl.full((TILE,), 0, tl.int64)
    for begin in range(0, vocab_size, TILE):
        value = load_logits(of_row, begin + offset, vocab_size)
        amount += tl.where(sortable_of(value) >= least, weights(value, row_highest, scale), 0)
    return tl.sum(amount, 0)


@triton.jit
def least_of_row(of_row, vocab_size, row_highest, scale, wanted, COUNTS: tl.constexpr, TILE: tl.constexpr):
    """Return the same of a whole row, two bits at each pass over it."""
    offset = tl.arange(0, TILE)
    least = tl.full((), 0, tl.uint32)
    unit = tl.full((), _FIRST_UNIT, tl.uint32)
    for _pass in range(16):
        once = tl.full((TILE,), 0, tl.int64)
        twice, thrice = once, once
        for begin in range(0, vocab_size, TILE):
            token = begin + offset
            value = load_logits(of_row, token, vocab_size)
            amount = _amounts(value, token, vocab_size, row_highest, scale, COUNTS)
            sortable = sortable_of(value)
            once += tl.where(sortable >= least + unit, amount, 0)
            twice += tl.where(sortable >= least + 2 * unit, amount, 0)
            thrice += tl.where(sortable >= least + 3 * unit, amount, 0)
        digit = (tl.sum(once, 0).to(tl.float64) >= wanted).to(tl.uint32)
        digit += (tl.sum(twice, 0).to(tl.float64) >= wanted).to(tl.uint32)
        digit += (tl.sum(thrice, 0).to(tl.float64) >= wanted).to(tl.uint32)
        least += digit * unit
        unit = unit >> 2
    return least

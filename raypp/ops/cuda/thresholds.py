"""Functions for kernels that find which tokens of a row stay. Twin: `raypp.ops.sample.truncation`.

Tokens stay up to a distance: the largest one so that fewer tokens than wanted are nearer, or tokens of less weight. It
is found bit by bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from raypp.ops.sample import truncation as twin
from raypp.ops.sample.draw_sizes import DIGIT_BITS, NUM_DIGITS

_NUM_BITS = DIGIT_BITS * NUM_DIGITS
_DISTANCE_BITS = tl.constexpr(_NUM_BITS)
_HIGHEST_BIT = tl.constexpr(1 << (_NUM_BITS - 1))
_BIT_PAIRS = tl.constexpr((_NUM_BITS + 1) // 2)  # of an odd number of bits
_FRACTION_BITS = tl.constexpr(twin.FRACTION_BITS)
_FRACTION = tl.constexpr((1 << twin.FRACTION_BITS) - 1)
_TO_32_BITS = tl.constexpr(32 - twin.FRACTION_BITS)
_LOG2_E = tl.constexpr(twin.LOG2_E)
_FARTHEST = tl.constexpr(twin.FARTHEST)
_MOST = tl.constexpr(twin.MOST)
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
def distances(values, highest, scale):
    """Return how much less likely tokens are than the most likely one, int32."""
    return -tl.maximum((values - highest) * scale, -_FARTHEST).to(tl.int32)


@triton.jit
def weights(distance):
    """Return each token's weight, int64; all of it in integers, as the twin has it."""
    exponent = -distance
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
    return tl.minimum(tl.div_rn(tl.full((), _LOG2_E, tl.float32), temperature), _MOST)


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
def farthest_of_vector(distance, amounts, wanted):
    """Return the largest distance so that tokens which are nearer amount to less than `wanted`. Shapes: both [N]."""
    farthest, bit = tl.full((), 0, tl.int32), tl.full((), _HIGHEST_BIT, tl.int32)
    for _pass in range(_DISTANCE_BITS):
        farther = farthest | bit
        nearer = tl.sum(tl.where(distance < farther, amounts, 0), 0)
        farthest = tl.where(nearer.to(tl.float64) < wanted, farther, farthest)
        bit = bit >> 1
    return farthest


@triton.jit
def _amounts(distance, token, vocab_size, COUNTS: tl.constexpr):
    """Return what `farthest_of_row` sums: 1 for each token of the vocabulary, or its weight."""
    if COUNTS:
        return (token < vocab_size).to(tl.int64)
    return weights(distance)


@triton.jit
def weight_of_row(of_row, vocab_size, row_highest, scale, farthest, TILE: tl.constexpr):
    """Return the weight of a row's tokens up to a distance."""
    offset = tl.arange(0, TILE)
    amount = tl.full((TILE,), 0, tl.int64)
    for begin in range(0, vocab_size, TILE):
        value = load_logits(of_row, begin + offset, vocab_size)
        distance = distances(value, row_highest, scale)
        amount += tl.where(distance <= farthest, weights(distance), 0)
    return tl.sum(amount, 0)


@triton.jit
def farthest_of_row(of_row, vocab_size, row_highest, scale, wanted, COUNTS: tl.constexpr, TILE: tl.constexpr):
    """Return the same of a whole row, two bits at each pass over it."""
    offset = tl.arange(0, TILE)
    farthest = tl.full((), 0, tl.int32)
    unit = tl.full((), _HIGHEST_BIT, tl.int32)
    for _pass in range(_BIT_PAIRS):
        once = tl.full((TILE,), 0, tl.int64)
        twice, thrice = once, once
        for begin in range(0, vocab_size, TILE):
            token = begin + offset
            distance = distances(load_logits(of_row, token, vocab_size), row_highest, scale)
            amount = _amounts(distance, token, vocab_size, COUNTS)
            once += tl.where(distance < farthest + unit, amount, 0)
            twice += tl.where(distance < farthest + 2 * unit, amount, 0)
            thrice += tl.where(distance < farthest + 3 * unit, amount, 0)
        digit = (tl.sum(once, 0).to(tl.float64) < wanted).to(tl.int32)
        digit += (tl.sum(twice, 0).to(tl.float64) < wanted).to(tl.int32)
        digit += (tl.sum(thrice, 0).to(tl.float64) < wanted).to(tl.int32)
        farthest += digit * unit
        unit = unit >> 2
    return farthest

"""The noise of draws: a function of a row's seed, the position and the token. Twin: `raypp.ops.sample.token_choice`."""

from __future__ import annotations

import triton
import triton.language as tl

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)


@triton.jit
def _mix(bits):
    bits = (bits ^ (bits >> 30)) * _MIX_1
    bits = (bits ^ (bits >> 27)) * _MIX_2
    return bits ^ (bits >> 31)


@triton.jit
def key_of(seeds, positions, row, of):
    """Return the stream of a row's noise."""
    seed = tl.load(seeds + of).to(tl.uint64, bitcast=True)
    position = tl.load(positions + row).to(tl.uint64, bitcast=True)
    return _mix(_mix(seed + _GOLDEN) + (position + 1) * _GOLDEN)


@triton.jit
def gumbel(key, token):
    """Return the noise of tokens, float32."""
    bits = _mix(key + (token + 1).to(tl.uint64) * _GOLDEN) & 0xFFFFFFFF
    uniform = (bits.to(tl.uint32).to(tl.float32) + 0.5) * 2.0**-32
    uniform = tl.minimum(uniform, _BELOW_ONE)
    # log(1 - u), exact where u is small: the rounding of 1 - u is divided out again (W. Kahan's trick).
    rest = 1.0 - uniform
    log_rest = tl.where(rest == 1.0, -uniform, tl.log(rest) * (uniform / (1.0 - rest)))
    return -tl.log(-log_rest)

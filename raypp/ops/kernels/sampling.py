"""Choosing a token per row in one or two launches. Twin: `raypp.ops.sampling`, whose draws these are.

    program (row, part)       the best token of a part of the vocabulary
    the last part to finish   the best of the parts

Of equal tokens the lowest wins, whatever the order in which parts finish. A draw subtracts the row's highest logit
before it divides by the temperature, as the twin does; so it is two launches, the first of which finds that highest.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from raypp.ops.kernels.launch import Device, arrives_last, start
from raypp.ops.kernels.workspace import Workspace
from raypp.ops.sampling import Truncation, mask_truncated, temper

_TILE = 2048
_MIN_PART = 4096
_MAX_PARTS = tl.constexpr(1024)

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)


class TokenChooser:
    """Chooses tokens from logits.

    Args:
        max_rows: The most rows of a call.
        device: Where it runs.
        workspace: For the parts' results.
    """

    def __init__(self, max_rows: int, device: Device, workspace: Workspace) -> None:
        self._device = device
        self._workspace = workspace
        self._max_rows = max_rows
        workspace.reserve(3 * max(max_rows, 4 * device.num_processors))

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        """Return each row's most likely token, int64 [N]. Shapes: logits [N, V] contiguous."""
        return self._best(logits)[0]

    def draw(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        truncation: Truncation | None = None,
    ) -> torch.Tensor:
        """Return a draw per row, the most likely token where the temperature is 0, int64 [N].

        Shapes: logits [N, V] contiguous; temperature [N] float32; seeds, positions [N] int64.
        """
        if truncation is not None:
            logits = mask_truncated(temper(logits, temperature), *truncation)
            temperature = (temperature != 0).to(torch.float32)  # what is left to be said of it
        _, highest = self._best(logits)
        num_rows, vocab_size = logits.shape
        tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
        if num_rows:
            part, num_parts = self._parts(num_rows, vocab_size)
            floats = self._workspace.floats
            _draw[(num_rows, num_parts)](
                logits,
                temperature,
                seeds,
                positions,
                highest,
                tokens,
                floats,
                _behind(floats, num_rows * num_parts),
                self._workspace.counters,
                vocab_size,
                part // _TILE,
                TILE=_TILE,
                OVERLAPS=self._device.has_dependent_launch,
                num_warps=4,
                **self._device.launch_options,
            )
        return tokens

    def _best(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each row's best token, int64 [N], and its logit, float32 [N]."""
        num_rows, vocab_size = logits.shape
        tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
        highest = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
        if num_rows:
            part, num_parts = self._parts(num_rows, vocab_size)
            floats = self._workspace.floats
            _best[(num_rows, num_parts)](
                logits,
                tokens,
                highest,
                floats,
                _behind(floats, num_rows * num_parts),
                self._workspace.counters,
                vocab_size,
                part // _TILE,
                TILE=_TILE,
                OVERLAPS=self._device.has_dependent_launch,
                num_warps=4,
                **self._device.launch_options,
            )
        return tokens, highest

    def _parts(self, num_rows: int, vocab_size: int) -> tuple[int, int]:
        """Return the tokens of a part, and the parts of a row: about four programs per processor."""
        wanted = max(1, min(triton.cdiv(vocab_size, _MIN_PART), 4 * self._device.num_processors // num_rows))
        part = triton.cdiv(triton.cdiv(vocab_size, wanted), _TILE) * _TILE
        num_parts = triton.cdiv(vocab_size, part)
        assert num_parts <= _MAX_PARTS.value
        return part, num_parts


def _behind(floats: torch.Tensor, count: int) -> torch.Tensor:
    """Return what lies behind so many floats, as int32, from a multiple of 16 bytes on: else it is another kernel."""
    return floats.view(torch.int32)[triton.cdiv(count, 4) * 4 :]


@triton.jit
def _better(value, token, other_value, other_token):
    """Return the better of two tokens: the likelier, then the lower."""
    takes_other = (other_value > value) | ((other_value == value) & (other_token < token))
    return tl.where(takes_other, other_value, value), tl.where(takes_other, other_token, token)


@triton.jit
def _mix(bits):
    bits = (bits ^ (bits >> 30)) * _MIX_1
    bits = (bits ^ (bits >> 27)) * _MIX_2
    return bits ^ (bits >> 31)


@triton.jit
def _gumbel(key, token):
    """Return the noise of tokens, float32. `key` is uint64, of the seed and the position."""
    bits = _mix(key + (token + 1).to(tl.uint64) * _GOLDEN) & 0xFFFFFFFF
    uniform = (bits.to(tl.uint32).to(tl.float32) + 0.5) * 2.0**-32
    uniform = tl.minimum(uniform, _BELOW_ONE)
    # log(1 - u), exact where u is small: the rounding of 1 - u is divided out again (W. Kahan's trick).
    rest = 1.0 - uniform
    log_rest = tl.where(rest == 1.0, -uniform, tl.log(rest) * (uniform / (1.0 - rest)))
    return -tl.log(-log_rest)


@triton.jit
def _best_of_parts(value, token, row, values, tokens, counters):
    """Return whether this program is the row's last, and then the best of all parts."""
    part, num_parts = tl.program_id(1), tl.num_programs(1)
    tl.store(values + row * num_parts + part, value)
    tl.store(tokens + row * num_parts + part, token)
    is_last = arrives_last(counters + row, num_parts)
    if is_last:
        index = tl.arange(0, _MAX_PARTS)
        inside = index < num_parts
        all_values = tl.load(values + row * num_parts + index, mask=inside, other=-float("inf"), cache_modifier=".cg")
        all_tokens = tl.load(tokens + row * num_parts + index, mask=inside, other=0x7FFFFFFF, cache_modifier=".cg")
        value = tl.max(all_values, 0)
        token = tl.min(tl.where(all_values == value, all_tokens, 0x7FFFFFFF), 0)
    return is_last, value, token


@triton.jit(do_not_specialize=["num_tiles"])  # one kernel for any number of rows
def _best(
    logits,
    tokens,
    highest,
    part_values,
    part_tokens,
    counters,
    vocab_size,
    num_tiles,
    TILE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0)
    first = tl.program_id(1) * num_tiles * TILE
    offset = tl.arange(0, TILE)
    best_value = tl.full((TILE,), -float("inf"), tl.float32)
    best_token = tl.full((TILE,), 0x7FFFFFFF, tl.int32)
    start(OVERLAPS)
    for begin in range(first, tl.minimum(first + num_tiles * TILE, vocab_size), TILE):
        token = begin + offset
        value = tl.load(logits + row.to(tl.int64) * vocab_size + token, mask=token < vocab_size, other=-float("inf"))
        best_value, best_token = _better(best_value, best_token, value.to(tl.float32), token)
    value = tl.max(best_value, 0)
    token = tl.min(tl.where(best_value == value, best_token, 0x7FFFFFFF), 0)
    is_last, value, token = _best_of_parts(value, token, row, part_values, part_tokens, counters)
    if is_last:
        tl.store(tokens + row, tl.minimum(token, vocab_size - 1).to(tl.int64))  # a row of NaN has no best
        tl.store(highest + row, value)


@triton.jit(do_not_specialize=["num_tiles"])  # one kernel for any number of rows
def _draw(
    logits,
    temperature,
    seeds,
    positions,
    highest,
    tokens,
    part_values,
    part_tokens,
    counters,
    vocab_size,
    num_tiles,
    TILE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0)
    first = tl.program_id(1) * num_tiles * TILE
    offset = tl.arange(0, TILE)
    best_value = tl.full((TILE,), -float("inf"), tl.float32)
    best_token = tl.full((TILE,), 0x7FFFFFFF, tl.int32)
    start(OVERLAPS)
    row_temperature = tl.load(temperature + row)
    is_greedy = row_temperature == 0.0
    divisor = tl.where(is_greedy, 1.0, row_temperature)
    row_highest = tl.load(highest + row)
    seed = tl.load(seeds + row).to(tl.uint64, bitcast=True)
    position = tl.load(positions + row).to(tl.uint64, bitcast=True)
    key = _mix(_mix(seed + _GOLDEN) + (position + 1) * _GOLDEN)
    for begin in range(first, tl.minimum(first + num_tiles * TILE, vocab_size), TILE):
        token = begin + offset
        value = tl.load(logits + row.to(tl.int64) * vocab_size + token, mask=token < vocab_size, other=-float("inf"))
        value = (value.to(tl.float32) - row_highest) / divisor
        if not is_greedy:
            value += _gumbel(key, token)
        best_value, best_token = _better(best_value, best_token, value, token)
    value = tl.max(best_value, 0)
    token = tl.min(tl.where(best_value == value, best_token, 0x7FFFFFFF), 0)
    is_last, value, token = _best_of_parts(value, token, row, part_values, part_tokens, counters)
    if is_last:
        tl.store(tokens + row, tl.minimum(token, vocab_size - 1).to(tl.int64))  # a row of NaN has no best

"""Members of a stage choose a token per row from their parts of the logits. Twin: `raypp.ops.sample.token_choice`.

Greedy tokens take one exchange: each member's best token. Draws take seven, whatever the rows ask for:

    survey    the member's best token and pivot, see `raypp.ops.cuda.draw_kernels`       --> exchange
    add       of a truncated row, counts and weights of tokens by a digit of the         --> exchange
              distance: three times for top-k, which has the first digit of top-p,
              and twice for that                                                         --> ...
    draw      the best of the tokens that stay, with noise, which is keyed by the token  --> exchange

Each launch reads what the exchange before it has brought: a row's next digit, which all members find alike, since they
add the same integers. See `raypp.ops.sample.truncation`. Rows that are not truncated add nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from raypp.ops.cuda.draw_kernels import (
    MOST,
    TILE,
    TokenChooser,
    arguments_of,
    best_draw,
    best_of_parts,
    better,
    key_of,
    store_best,
    store_pair,
    truncation_of,
)
from raypp.ops.cuda.kernel_launch import Device, Workspace, start
from raypp.ops.cuda.member_sums import PushedSums
from raypp.ops.cuda.thresholds import distances, load_logits, logits_of, scale_of, weights
from raypp.ops.sample.draw_sizes import DIGIT_BITS, NUM_DIGITS
from raypp.ops.sample.tables import AdjustedLogits, RowTables
from raypp.ops.sample.vocabulary_part import VocabularyPart

_DIGIT_BITS = tl.constexpr(DIGIT_BITS)
_NUM_BINS = tl.constexpr(1 << DIGIT_BITS)
_NUM_DIGITS = tl.constexpr(NUM_DIGITS)
_LAST = tl.constexpr(2 * NUM_DIGITS - 1)
"""The step of the draw: after the digits of top-k, and those of top-p but for the first."""
_ROWS = 8
_PADDING = tl.constexpr(_ROWS)
_ANY_DISTANCE = tl.constexpr(0x7FFFFFFF)


class MemberChooser(TokenChooser):
    """Chooses tokens from a member's part of the logits; all members do, at the same time.

    Args:
        max_rows: The most rows of a call.
        device: Where it runs.
        workspace: For the parts' results.
        part: Whose logits are given.
    """

    def __init__(self, max_rows: int, device: Device, workspace: Workspace, part: VocabularyPart) -> None:
        super().__init__(max_rows, device, workspace)
        self._part = part
        self._gathered = PushedSums(part.members, device).gathered

    def greedy(self, logits: AdjustedLogits) -> torch.Tensor:
        """Return each position's most likely token, int64 [N]. Shapes: logits [N, C] contiguous."""
        pairs = self._pairs(len(logits.own))
        self._find_best(logits, pairs, IS_PART=True)
        return self._best_of_members(pairs, len(logits.own))

    def draw(
        self,
        logits: AdjustedLogits,
        rows: torch.Tensor,
        positions: torch.Tensor,
        tables: RowTables,
        *,
        truncates: bool = True,
    ) -> torch.Tensor:
        """Return a draw per position; see `TokenChooser.draw`. Shapes: logits [N, C] contiguous."""
        num_rows, num_logits = logits.own.shape
        part, at, gathered = self._part, logits.own.device, self._gathered
        tokens = torch.empty(num_rows, dtype=torch.int64, device=at)
        if not num_rows:
            return tokens
        found = torch.empty(2, _padded(num_rows), device=at)
        given = arguments_of(logits, rows, tables)
        between = self._between(num_logits, room=1)
        self._survey(logits, given, tokens, (*found.unbind(), *between[2:]), part.vocab_size)
        found_by_all = gathered(found)
        num_bins = _NUM_BINS.value
        added = torch.zeros(2, 2, num_rows, num_bins, dtype=torch.int64, device=at)  # in turns; counts, weights
        states = torch.empty(2, 4, num_rows, dtype=torch.int64, device=at)
        of_part, num_parts = self._parts(num_rows, num_logits)
        sizes = (num_logits, of_part // TILE, num_rows, part.vocab_size)
        options = {"COUNT": part.members.count, "TILE": TILE, **self._launch_options(logits)}
        first = sums = added
        for step in range(_LAST.value):
            own, other = added[step & 1], added[1 - step & 1]
            by_digit = (found_by_all, first, sums, states)
            _add_by_digit[(num_rows, num_parts)](*given, *by_digit, own, other, *sizes, step, **options)
            has_counts = step < _NUM_DIGITS.value
            sums = gathered((own if has_counts else own[1]).view(torch.int32)).view(torch.int64)
            first = sums if step == 0 else first
        pairs = self._pairs(num_rows)
        _draw_part[(num_rows, num_parts)](
            *given,
            *(found_by_all, first, sums, states),
            *(tables.seed, positions, tokens, found, pairs),
            *self._results_of_parts(num_rows * num_parts),
            *sizes,
            part.first,
            **options,
        )
        return self._best_of_members(pairs, num_rows)

    def _pairs(self, num_rows: int) -> torch.Tensor:
        return torch.empty(_padded(num_rows), 2, dtype=torch.int32, device=self._device.torch_device)

    def _best_of_members(self, pairs: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Return the token of the largest value of any member. Shapes: pairs [N or more, 2] int32."""
        part = self._part
        tokens = torch.empty(num_rows, dtype=torch.int64, device=pairs.device)
        if num_rows:
            options = {"COUNT": part.members.count, "OVERLAPS": self._device.has_dependent_launch, "num_warps": 1}
            given = (self._gathered(pairs), tokens, len(pairs), part.size, part.vocab_size)
            _best_of_members[(num_rows,)](*given, **options, **self._device.launch_options)
        return tokens


def _padded(num_rows: int) -> int:
    """Return so many rows, or a few more, that two numbers each are pushed, see `PushedSums.gathered`."""
    return -(-num_rows // _ROWS) * _ROWS


_AS_THEY_ARE = ["num_tiles", "num_rows", "step", "first_token"]


@triton.jit(do_not_specialize=_AS_THEY_ARE)
def _best_of_members(pairs, tokens, num_rows, num_logits, vocab_size, COUNT: tl.constexpr, OVERLAPS: tl.constexpr):
    row = tl.program_id(0)
    best_value, best_token = tl.full((), -float("inf"), tl.float32), tl.full((), 0x7FFFFFFF, tl.int32)
    start(OVERLAPS)
    for member in tl.static_range(COUNT):
        pair = pairs + 2 * (member * num_rows + row)
        value, place = tl.load(pair).to(tl.float32, bitcast=True), tl.load(pair + 1)
        token = tl.where(place == 0x7FFFFFFF, place, place + member * num_logits)
        best_value, best_token = better(best_value, best_token, value, token)
    store_best(tokens, row, best_value, best_token, vocab_size)


@triton.jit
def _padded_rows(num_rows):
    return (num_rows + _PADDING - 1) // _PADDING * _PADDING


@triton.jit
def _highest_of(found, row, num_rows, COUNT: tl.constexpr):
    """Return the largest of a row's values of all members."""
    stride = 2 * _padded_rows(num_rows)
    value = tl.load(found + row)
    for member in tl.static_range(1, COUNT):
        value = tl.maximum(value, tl.load(found + member * stride + row))
    return value


@triton.jit
def _sum_of(sums, stride, COUNT: tl.constexpr):
    """Return the sum of all members' bins, int64."""
    of_bins = sums + tl.arange(0, _NUM_BINS)
    total = tl.load(of_bins)
    for member in tl.static_range(1, COUNT):
        total += tl.load(of_bins + member * stride)
    return total


@triton.jit
def _next_digit(amounts, nearer, wanted):
    """Return the digit of the bin in which the amount from the nearest token on reaches `wanted`."""
    reached = nearer + tl.cumsum(amounts, 0)
    return tl.sum((reached.to(tl.float64) < wanted).to(tl.int64), 0)


@triton.jit
def _up_to(amounts, digit):
    """Return the amount of the bins before that of a digit, and with it."""
    bin = tl.arange(0, _NUM_BINS)
    return tl.sum(tl.where(bin < digit, amounts, 0), 0), tl.sum(tl.where(bin <= digit, amounts, 0), 0)


@triton.jit
def _narrowed(row, num_rows, step, row_k, row_p, first, sums, states, COUNT: tl.constexpr):
    """Return the distance that is known so far of a truncated row, after the last exchange, int32.

    That of top-k is known after three, that of top-p after two more.
    """
    before, after = states + ((step + 1) % 2) * 4 * num_rows + row, states + (step % 2) * 4 * num_rows + row
    num_bins = num_rows * _NUM_BINS
    low, num_nearer = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    nearer, left = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    if step > 1:
        low, num_nearer = tl.load(before), tl.load(before + num_rows)
        nearer, left = tl.load(before + 2 * num_rows), tl.load(before + 3 * num_rows)
    if (row_k > 0) & (step >= 1) & (step <= _NUM_DIGITS):
        of_row = sums + (row * _NUM_BINS)
        counts, amounts = _sum_of(of_row, 2 * num_bins, COUNT), _sum_of(of_row + num_bins, 2 * num_bins, COUNT)
        digit = _next_digit(counts, num_nearer, row_k.to(tl.float64))
        low += digit << (_DIGIT_BITS * (_NUM_DIGITS - step))
        left = nearer + _up_to(amounts, digit)[1]
        nearer += _up_to(amounts, digit)[0]
        num_nearer += _up_to(counts, digit)[0]
    if (row_p < 1.0) & (step >= _NUM_DIGITS):
        of_row, stride = sums + (row * _NUM_BINS), num_bins
        if step == _NUM_DIGITS:
            of_row, stride = first + num_bins + (row * _NUM_BINS), 2 * num_bins
            low, nearer = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
        amounts = _sum_of(of_row, stride, COUNT)
        if (step == _NUM_DIGITS) & (row_k == 0):
            left = tl.sum(amounts, 0)
        digit = _next_digit(amounts, nearer, left.to(tl.float64) * row_p.to(tl.float64))
        low += digit << (_DIGIT_BITS * (_LAST - step))
        nearer += _up_to(amounts, digit)[0]
    if tl.program_id(1) == 0:
        tl.store(after, low)
        tl.store(after + num_rows, num_nearer)
        tl.store(after + 2 * num_rows, nearer)
        tl.store(after + 3 * num_rows, left)
    return low.to(tl.int32)


@triton.jit(do_not_specialize=_AS_THEY_ARE, do_not_specialize_on_alignment=["rows", "first", "sums"])
def _add_by_digit(
    logits,
    changed,
    is_changed,
    rows,
    temperature,
    top_k,
    top_p,
    min_p,
    found,
    first,
    sums,
    states,
    added,
    cleared,
    num_logits,
    num_tiles,
    num_rows,
    vocab_size,
    step,
    COUNT: tl.constexpr,
    TILE: tl.constexpr,
    HAS_CHANGED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0)
    begins = tl.program_id(1) * num_tiles * TILE
    start(OVERLAPS)
    of = tl.load(rows + row)
    of_row = logits_of(row, logits, changed, is_changed, num_logits, HAS_CHANGED)
    row_temperature, row_k, row_p, is_truncated = truncation_of(of, temperature, top_k, top_p, vocab_size)
    row_highest = _highest_of(found, row, num_rows, COUNT)
    of_bins, num_bins = row * _NUM_BINS, num_rows * _NUM_BINS
    if tl.program_id(1) == 0:
        bin = tl.arange(0, _NUM_BINS)
        tl.store(cleared + of_bins + bin, tl.zeros_like(bin).to(tl.int64))
        tl.store(cleared + num_bins + of_bins + bin, tl.zeros_like(bin).to(tl.int64))
    if is_truncated & (row_highest < float("inf")):
        low = _narrowed(row, num_rows, step, row_k, row_p, first, sums, states, COUNT)
        scale = scale_of(row_temperature)
        is_of_k = step < _NUM_DIGITS
        # Without top-k, all weights by the first digit are all that top-p needs of its steps.
        if tl.where(is_of_k, (row_k > 0) | (step == 0), row_p < 1.0):
            shift = _DIGIT_BITS * (tl.where(is_of_k, _NUM_DIGITS, _LAST) - 1 - step)
            farthest = tl.full((), _ANY_DISTANCE, tl.int32)
            if (step == 0) & (row_k > 0):
                pivot = _highest_of(found + _padded_rows(num_rows), row, num_rows, COUNT)
                farthest = distances(pivot, row_highest, scale)
            for begin in range(begins, tl.minimum(begins + num_tiles * TILE, num_logits), TILE):
                token = begin + tl.arange(0, TILE)
                distance = distances(load_logits(of_row, token, num_logits), row_highest, scale)
                digit = (distance - low) >> shift
                inside = (token < num_logits) & (distance >= low) & (distance <= farthest) & (digit < _NUM_BINS)
                num_inside = tl.sum(inside.to(tl.int32), 0)
                if num_inside > 0:
                    bins = added + of_bins
                    amount = tl.where(inside, weights(distance), 0)
                    if num_inside > TILE // 8:  # flat: most have few digits, and would wait for each other
                        usual = tl.sum(tl.where(inside, digit, 0), 0) // num_inside
                        for near in tl.static_range(-1, 2):
                            is_it = inside & (digit == usual + near)
                            total = tl.sum(tl.where(is_it, amount, 0), 0)
                            tl.atomic_add(bins + num_bins + usual + near, total, mask=total > 0, sem="relaxed")
                            total = tl.sum(is_it.to(tl.int64), 0)
                            tl.atomic_add(bins + usual + near, total, mask=total > 0, sem="relaxed")
                            inside &= digit != usual + near
                    is_counted = inside & is_of_k & (row_k > 0)
                    tl.atomic_add(bins + digit, tl.full((TILE,), 1, tl.int64), mask=is_counted, sem="relaxed")
                    has_weight = inside & (amount > 0)
                    tl.atomic_add(bins + num_bins + digit, amount, mask=has_weight, sem="relaxed")


@triton.jit(do_not_specialize=_AS_THEY_ARE, do_not_specialize_on_alignment=["rows", "positions", "first", "sums"])
def _draw_part(
    logits,
    changed,
    is_changed,
    rows,
    temperature,
    top_k,
    top_p,
    min_p,
    found,
    first,
    sums,
    states,
    seeds,
    positions,
    own_tokens,
    own_found,
    pairs,
    part_values,
    part_tokens,
    counters,
    num_logits,
    num_tiles,
    num_rows,
    vocab_size,
    first_token,
    COUNT: tl.constexpr,
    TILE: tl.constexpr,
    HAS_CHANGED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0)
    begins = tl.program_id(1) * num_tiles * TILE
    start(OVERLAPS)
    of = tl.load(rows + row)
    of_row = logits_of(row, logits, changed, is_changed, num_logits, HAS_CHANGED)
    row_temperature, row_k, row_p, is_truncated = truncation_of(of, temperature, top_k, top_p, vocab_size)
    row_highest = _highest_of(found, row, num_rows, COUNT)
    if (row_temperature != 0.0) & (row_highest < float("inf")):
        farthest = tl.full((), _ANY_DISTANCE, tl.int32)
        if is_truncated:
            farthest = _narrowed(row, num_rows, _LAST, row_k, row_p, first, sums, states, COUNT)
        key = key_of(seeds, positions, row, of)
        least_weight = tl.load(min_p + of).to(tl.float64) * MOST
        ends = tl.minimum(begins + num_tiles * TILE, num_logits)
        value, token = best_draw(
            of_row,
            begins,
            ends,
            num_logits,
            first_token,
            row_highest,
            row_temperature,
            farthest,
            least_weight,
            key,
            TILE,
        )
        is_last, value, token = best_of_parts(value, token, row, part_values, part_tokens, counters)
        if is_last:
            store_pair(pairs, row, value, token)
    elif tl.program_id(1) == 0:
        value = tl.where(row_highest < float("inf"), tl.load(own_found + row), float("inf"))
        store_pair(pairs, row, value, tl.load(own_tokens + row).to(tl.int32))

"""Chooses a token per row, greedily or by a draw. Twins: `raypp.ops.sample.token_choice`, `.truncation`.

Greedy tokens take one launch, in which the last program of a row compares what all have found. Draws take four:

    survey   (row, part)   the best token, and the highest logit of each block of the vocabulary;
                           of a truncated row, a pivot that at least top_k tokens reach
    gather   (row, part)   of a truncated row the tokens that reach the pivot, and the weight of the whole vocabulary
                           if top-p needs it; other rows are drawn here
    finish   (row)         of a truncated row with few gathered tokens, which of them stay, and the draw
    search   (row)         the same for a row with many; it reads the whole row, more than once, where there was no
                           room for all, or where they weigh too little for top-p

So logits are read twice and never sorted, and noise is computed for tokens that may be drawn. The pivot is the k-th
highest of the blocks' highest logits: k tokens reach it, and mostly few more. Up to which distance from the most likely
token they stay is found bit by bit, see `raypp.ops.cuda.thresholds`. Members of a stage: `raypp.ops.cuda.member_draws`.

Of equally likely tokens the one with the lowest id wins, in whatever order the parts finish.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from raypp.ops.cuda.kernel_launch import Device, Workspace, arrives_last, start
from raypp.ops.cuda.thresholds import (
    distances,
    farthest_of_row,
    farthest_of_vector,
    load_logits,
    logits_of,
    scale_of,
    sortable_of,
    value_of,
    weight_of_row,
    weights,
)
from raypp.ops.sample import truncation as twin
from raypp.ops.sample.draw_sizes import MAX_NUM_BLOCKS, ROOM
from raypp.ops.sample.tables import AdjustedLogits, RowTables

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


TILE = 2048
_MIN_PART = 4096
_MAX_PARTS = tl.constexpr(1024)
_MIN_BLOCK = 8
_FEW = 1024
"""The most gathered tokens that `finish` draws from."""
_SEARCHED_TILE = 4096
_PIVOT_BITS = tl.constexpr(24)
_HIGHEST_BIT = tl.constexpr(1 << 31)
_MINUS_INFINITY = tl.constexpr(0x007FFFFF)

MOST = tl.constexpr(2.0**twin.WEIGHT_BITS)


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
        self._truncated: _Truncated | None = None
        workspace.reserve(3 * max(max_rows, 4 * device.num_processors))

    def greedy(self, logits: AdjustedLogits) -> torch.Tensor:
        """Return each position's most likely token, int64 [N]. Shapes: logits [N, V] contiguous."""
        tokens = torch.empty(len(logits.own), dtype=torch.int64, device=logits.own.device)
        self._find_best(logits, tokens, IS_PART=False)
        return tokens

    def _find_best(self, logits: AdjustedLogits, into: torch.Tensor, **options: bool) -> None:
        num_rows, vocab_size = logits.own.shape
        if num_rows:
            part, num_parts = self._parts(num_rows, vocab_size)
            given = (*_tensors(logits), into, *self._results_of_parts(num_rows * num_parts))
            launch = self._launch_options(logits) | options
            _best[(num_rows, num_parts)](*given, vocab_size, part // TILE, TILE=TILE, **launch)

    def draw(
        self,
        logits: AdjustedLogits,
        rows: torch.Tensor,
        positions: torch.Tensor,
        tables: RowTables,
        *,
        truncates: bool = True,
    ) -> torch.Tensor:
        """Return a draw per position, the most likely token where its row's temperature is 0, int64 [N].

        Whether a row truncates is read on the device, whatever `truncates` says.

        Shapes: logits [N, V] contiguous; rows, positions [N] int64.
        """
        num_rows, vocab_size = logits.own.shape
        tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.own.device)
        if not num_rows:
            return tokens
        given, between = arguments_of(logits, rows, tables), self._between(vocab_size, ROOM)
        self._survey(logits, given, tokens, between, vocab_size)
        part, num_parts = self._parts(num_rows, vocab_size)
        parts = self._results_of_parts(num_rows * num_parts)
        sizes = (vocab_size, part // TILE)
        launch = self._launch_options(logits)
        _gather[(num_rows, num_parts)](
            *given, tables.seed, positions, tokens, *between, *parts, *sizes, TILE=TILE, ROOM=ROOM, **launch
        )
        by_row = (*given, tables.seed, positions, tokens, *between, vocab_size)
        rooms = {"ROOM": ROOM, "FEW": _FEW}
        _finish[(num_rows,)](*by_row, **rooms, **launch)
        launch |= {"TILE": _SEARCHED_TILE, "num_warps": 32}
        _search[(num_rows,)](*by_row, **rooms, **launch)
        return tokens

    def _between(self, vocab_size: int, room: int) -> tuple[torch.Tensor, ...]:
        """Return the buffers between the launches of a draw."""
        if self._truncated is None:
            self._truncated = _Truncated(self._max_rows, vocab_size, room, self._device.torch_device)
        return self._truncated.tensors()

    def _survey(
        self,
        logits: AdjustedLogits,
        given: tuple[torch.Tensor, ...],
        tokens: torch.Tensor,
        between: tuple[torch.Tensor, ...],
        vocab_size: int,
    ) -> None:
        """Find the best token of each row, its logit and, if the row is truncated, a pivot."""
        num_rows, num_logits = logits.own.shape
        part, num_parts = self._parts(num_rows, num_logits)
        assert self._truncated is not None
        _survey[(num_rows, num_parts)](
            *given,
            tokens,
            *between,
            *self._results_of_parts(num_rows * num_parts),
            num_logits,
            part // TILE,
            vocab_size,
            TILE=TILE,
            BLOCK=self._truncated.block,
            NUM_BLOCKS=self._truncated.num_blocks,
            PADDED_BLOCKS=triton.next_power_of_2(self._truncated.num_blocks),
            **self._launch_options(logits),
        )

    def _launch_options(self, logits: AdjustedLogits) -> dict[str, Any]:
        overlaps, has_changed = self._device.has_dependent_launch, logits.is_changed is not None
        return {"HAS_CHANGED": has_changed, "OVERLAPS": overlaps, "num_warps": 4, **self._device.launch_options}

    def _results_of_parts(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return room for the value and the token of so many parts, and counters of rows.

        Tokens lie at a multiple of 16 bytes: else it is another kernel.
        """
        floats = self._workspace.floats
        return floats, floats.view(torch.int32)[triton.cdiv(count, 4) * 4 :], self._workspace.counters

    def _parts(self, num_rows: int, vocab_size: int) -> tuple[int, int]:
        """Return the tokens of a part, and the parts of a row: about four programs per processor."""
        wanted = max(1, min(triton.cdiv(vocab_size, _MIN_PART), 4 * self._device.num_processors // num_rows))
        part = triton.cdiv(triton.cdiv(vocab_size, wanted), TILE) * TILE
        num_parts = triton.cdiv(vocab_size, part)
        assert num_parts <= _MAX_PARTS.value
        return part, num_parts


class _Truncated:
    """Buffers by row through which the launches of a draw hand results on."""

    def __init__(self, max_rows: int, vocab_size: int, room: int, device: torch.device) -> None:
        self.block = max(triton.next_power_of_2(triton.cdiv(vocab_size, MAX_NUM_BLOCKS - 1)), _MIN_BLOCK)
        self.num_blocks = triton.cdiv(vocab_size, TILE) * (TILE // self.block)

        def floats(*shape: int) -> torch.Tensor:
            return torch.empty(shape, device=device)

        self._highest, self._pivots = floats(max_rows), floats(max_rows)
        self._block_highest = floats(max_rows, self.num_blocks)
        self._num_gathered = torch.empty(max_rows, dtype=torch.int32, device=device)
        self._total_weights = torch.empty(max_rows, dtype=torch.int64, device=device)
        self._gathered = floats(max_rows, room)
        self._gathered_tokens = torch.empty(max_rows, room, dtype=torch.int32, device=device)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return all, in the order in which kernels take them."""
        return (
            self._highest,
            self._pivots,
            self._block_highest,
            self._num_gathered,
            self._total_weights,
            self._gathered,
            self._gathered_tokens,
        )


def _tensors(logits: AdjustedLogits) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the kernels' arguments. Without changed logits they read none, and any tensor takes their place."""
    if logits.changed is None or logits.is_changed is None:
        return logits.own, logits.own, logits.own
    return logits.own, logits.changed, logits.is_changed


def arguments_of(logits: AdjustedLogits, rows: torch.Tensor, tables: RowTables) -> tuple[torch.Tensor, ...]:
    """Return the first arguments of each kernel that draws."""
    return (*_tensors(logits), rows, tables.temperature, tables.top_k, tables.top_p, tables.min_p)


_BY_ROW = ["rows", "positions"]
"""Of which a program touches an element: where they begin is not worth a kernel of its own."""


@triton.jit
def better(value, token, other_value, other_token):
    """Return the better of two tokens: the likelier, then the lower."""
    takes_other = (other_value > value) | ((other_value == value) & (other_token < token))
    return tl.where(takes_other, other_value, value), tl.where(takes_other, other_token, token)


@triton.jit
def best_of(values, tokens):
    """Return the best of a vector of tokens."""
    value = tl.max(values, 0)
    return value, tl.min(tl.where(values == value, tokens, 0x7FFFFFFF), 0)


@triton.jit
def best_of_parts(value, token, row, values, tokens, counters):
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
        value, token = best_of(all_values, all_tokens)
    return is_last, value, token


@triton.jit
def _store_token(tokens, row, token, vocab_size):
    tl.store(tokens + row, tl.minimum(token, vocab_size - 1).to(tl.int64))


@triton.jit
def store_best(tokens, row, value, token, vocab_size):
    """Store the most likely token; -1 where logits are not finite."""
    _store_token(tokens, row, tl.where(value == float("inf"), -1, token), vocab_size)


@triton.jit
def store_pair(pairs, row, value, token):
    """Store a value and its token, int32 each."""
    tl.store(pairs + 2 * row, value.to(tl.int32, bitcast=True))
    tl.store(pairs + 2 * row + 1, token)


@triton.jit(do_not_specialize=["num_tiles"])  # one kernel for any number of rows
def _best(
    logits,
    changed,
    is_changed,
    into,
    part_values,
    part_tokens,
    counters,
    vocab_size,
    num_tiles,
    IS_PART: tl.constexpr,
    TILE: tl.constexpr,
    HAS_CHANGED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0)
    first = tl.program_id(1) * num_tiles * TILE
    offset = tl.arange(0, TILE)
    best_value = tl.full((TILE,), -float("inf"), tl.float32)
    best_token = tl.full((TILE,), 0x7FFFFFFF, tl.int32)
    start(OVERLAPS)
    of_row = logits_of(row, logits, changed, is_changed, vocab_size, HAS_CHANGED)
    for begin in range(first, tl.minimum(first + num_tiles * TILE, vocab_size), TILE):
        token = begin + offset
        value = load_logits(of_row, token, vocab_size)
        best_value, best_token = better(best_value, best_token, value, token)
    value, token = best_of(best_value, best_token)
    is_last, value, token = best_of_parts(value, token, row, part_values, part_tokens, counters)
    if is_last:
        if IS_PART:
            store_pair(into, row, value, token)
        else:
            store_best(into, row, value, token, vocab_size)


@triton.jit
def truncation_of(of, temperature, top_k, top_p, vocab_size):
    """Return a row's temperature, top_k (0 when it takes all), top_p, and whether it has either of these."""
    row_temperature = tl.load(temperature + of)
    row_k, row_p = tl.load(top_k + of), tl.load(top_p + of)
    row_k = tl.where(row_k >= vocab_size, 0, row_k)
    return row_temperature, row_k, row_p, (row_temperature != 0.0) & ((row_k > 0) | (row_p < 1.0))


@triton.jit(do_not_specialize=["num_tiles"], do_not_specialize_on_alignment=["rows"])
def _survey(
    logits,
    changed,
    is_changed,
    rows,
    temperature,
    top_k,
    top_p,
    min_p,
    tokens,
    highest,
    pivots,
    block_highest,
    num_gathered,
    total_weights,
    gathered,
    gathered_tokens,
    part_values,
    part_tokens,
    counters,
    num_logits,
    num_tiles,
    vocab_size,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr,
    HAS_CHANGED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0)
    first = tl.program_id(1) * num_tiles * TILE
    offset = tl.arange(0, TILE)
    best_value = tl.full((TILE,), -float("inf"), tl.float32)
    best_token = tl.full((TILE,), 0x7FFFFFFF, tl.int32)
    start(OVERLAPS)
    of = tl.load(rows + row)
    of_row = logits_of(row, logits, changed, is_changed, num_logits, HAS_CHANGED)
    _row_temperature, row_k, _row_p, is_truncated = truncation_of(of, temperature, top_k, top_p, vocab_size)
    of_blocks = block_highest + row * NUM_BLOCKS
    for begin in range(first, tl.minimum(first + num_tiles * TILE, num_logits), TILE):
        token = begin + offset
        value = load_logits(of_row, token, num_logits)
        best_value, best_token = better(best_value, best_token, value, token)
        if is_truncated:
            of_tile = tl.max(tl.reshape(value, (TILE // BLOCK, BLOCK)), 1)
            tl.store(of_blocks + begin // BLOCK + tl.arange(0, TILE // BLOCK), of_tile)
    value, token = best_of(best_value, best_token)
    is_last, value, token = best_of_parts(value, token, row, part_values, part_tokens, counters)
    if is_last:
        store_best(tokens, row, value, token, num_logits)
        tl.store(highest + row, value)
        if is_truncated:
            block = tl.arange(0, PADDED_BLOCKS)
            inside = block < NUM_BLOCKS
            of_block = tl.load(of_blocks + block, mask=inside, other=-float("inf"), cache_modifier=".cg")
            sortable = tl.where(inside, sortable_of(of_block), 0)
            rank = tl.where(row_k > 0, row_k, NUM_BLOCKS - NUM_BLOCKS // 16)
            pivot, bit = tl.full((), 0, tl.uint32), tl.full((), _HIGHEST_BIT, tl.uint32)
            for _pass in range(_PIVOT_BITS):
                higher = pivot | bit
                bit = bit >> 1
                pivot = tl.where(tl.sum((sortable >= higher).to(tl.int32), 0) >= rank, higher, pivot)
            # Below that of -inf the integer is no number: fewer blocks than top_k have a token that may be drawn.
            tl.store(pivots + row, tl.where(pivot < _MINUS_INFINITY, -float("inf"), value_of(pivot)))
            tl.store(num_gathered + row, 0)
            tl.store(total_weights + row, tl.full((), 0, tl.int64))


@triton.jit(do_not_specialize=["num_tiles"], do_not_specialize_on_alignment=_BY_ROW)
def _gather(
    logits,
    changed,
    is_changed,
    rows,
    temperature,
    top_k,
    top_p,
    min_p,
    seeds,
    positions,
    tokens,
    highest,
    pivots,
    block_highest,
    num_gathered,
    total_weights,
    gathered,
    gathered_tokens,
    part_values,
    part_tokens,
    counters,
    vocab_size,
    num_tiles,
    TILE: tl.constexpr,
    ROOM: tl.constexpr,
    HAS_CHANGED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0)
    first = tl.program_id(1) * num_tiles * TILE
    last = tl.minimum(first + num_tiles * TILE, vocab_size)
    offset = tl.arange(0, TILE)
    start(OVERLAPS)
    of = tl.load(rows + row)
    of_row = logits_of(row, logits, changed, is_changed, vocab_size, HAS_CHANGED)
    row_temperature, row_k, _row_p, is_truncated = truncation_of(of, temperature, top_k, top_p, vocab_size)
    row_highest = tl.load(highest + row)
    scale = scale_of(tl.where(row_temperature == 0.0, 1.0, row_temperature))
    is_finite = row_highest < float("inf")
    if is_truncated & is_finite:
        pivot = distances(tl.load(pivots + row), row_highest, scale)
        weight = tl.full((TILE,), 0, tl.int64)
        for begin in range(first, last, TILE):
            token = begin + offset
            value = load_logits(of_row, token, vocab_size)
            distance = distances(value, row_highest, scale)
            reaches = (distance <= pivot) & (token < vocab_size)
            num_reaching = tl.sum(reaches.to(tl.int32), 0)
            if num_reaching > 0:
                place = tl.atomic_add(num_gathered + row, num_reaching)
                place += tl.cumsum(reaches.to(tl.int32), 0) - 1
                has_room = reaches & (place < ROOM)
                tl.store(gathered + row * ROOM + place, value, mask=has_room)
                tl.store(gathered_tokens + row * ROOM + place, token, mask=has_room)
            if row_k == 0:
                weight += weights(distance)
        if row_k == 0:
            tl.atomic_add(total_weights + row, tl.sum(weight, 0))
    elif (row_temperature != 0.0) & is_finite:
        key = key_of(seeds, positions, row, of)
        least_weight = tl.load(min_p + of).to(tl.float64) * MOST
        best_value = tl.full((TILE,), -float("inf"), tl.float32)
        best_token = tl.full((TILE,), 0x7FFFFFFF, tl.int32)
        for begin in range(first, last, TILE):
            token = begin + offset
            logit = load_logits(of_row, token, vocab_size)
            value = (logit - row_highest) / row_temperature + gumbel(key, token)
            if least_weight > 0.0:
                stays = weights(distances(logit, row_highest, scale)).to(tl.float64) >= least_weight
                value = tl.where(stays, value, -float("inf"))
            best_value, best_token = better(best_value, best_token, value, token)
        value, token = best_of(best_value, best_token)
        is_last, value, token = best_of_parts(value, token, row, part_values, part_tokens, counters)
        if is_last:
            _store_token(tokens, row, token, vocab_size)


@triton.jit
def best_draw(
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
    TILE: tl.constexpr,
):
    """Return the draw from a row's logits between two places, with its value.

    It is of those alone that are near enough to the highest one, and weigh enough. `first_token`: of the row's logits.
    """
    scale = scale_of(row_temperature)
    best_value = tl.full((TILE,), -float("inf"), tl.float32)
    best_token = tl.full((TILE,), 0x7FFFFFFF, tl.int32)
    for begin in range(begins, ends, TILE):
        token = begin + tl.arange(0, TILE)
        logit = load_logits(of_row, token, num_logits)
        distance = distances(logit, row_highest, scale)
        stays = (distance <= farthest) & (token < num_logits)
        if least_weight > 0.0:
            stays &= weights(distance).to(tl.float64) >= least_weight
        if tl.max(stays.to(tl.int32), 0) > 0:
            value = (logit - row_highest) / row_temperature + gumbel(key, token + first_token)
            value = tl.where(stays, value, -float("inf"))
            best_value, best_token = better(best_value, best_token, value, token)
    return best_of(best_value, best_token)


@triton.jit
def _draw_gathered(
    row,
    of,
    row_temperature,
    row_k,
    row_p,
    count,
    min_p,
    seeds,
    positions,
    tokens,
    highest,
    total_weights,
    gathered,
    gathered_tokens,
    vocab_size,
    ROOM: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Draw from at most `SIZE` gathered tokens; return whether they are all that matter."""
    row_highest = tl.load(highest + row)
    scale = scale_of(row_temperature)
    index = tl.arange(0, SIZE)
    inside = index < count
    logit = tl.load(gathered + row * ROOM + index, mask=inside, other=-float("inf"))
    token = tl.load(gathered_tokens + row * ROOM + index, mask=inside, other=0x7FFFFFFF)
    distance = distances(logit, row_highest, scale)
    weight = tl.where(inside, weights(distance), 0)
    farthest = tl.full((), 0x7FFFFFFF, tl.int32)
    total = tl.load(total_weights + row)
    if row_k > 0:
        farthest = farthest_of_vector(distance, inside.to(tl.int64), row_k.to(tl.float64))
        total = tl.sum(tl.where(distance <= farthest, weight, 0), 0)
    limit = total.to(tl.float64) * row_p.to(tl.float64)
    is_enough = tl.where(row_k > 0, count >= row_k, tl.sum(weight, 0).to(tl.float64) >= limit)
    if is_enough:
        if row_p < 1.0:
            farthest = tl.minimum(farthest, farthest_of_vector(distance, weight, limit))
        stays = inside & (distance <= farthest)
        stays &= weight.to(tl.float64) >= tl.load(min_p + of).to(tl.float64) * MOST
        value = (logit - row_highest) / row_temperature + gumbel(key_of(seeds, positions, row, of), token)
        value, best = best_of(tl.where(stays, value, -float("inf")), token)
        _store_token(tokens, row, best, vocab_size)
    return is_enough


@triton.jit(do_not_specialize_on_alignment=_BY_ROW)
def _finish(
    logits,
    changed,
    is_changed,
    rows,
    temperature,
    top_k,
    top_p,
    min_p,
    seeds,
    positions,
    tokens,
    highest,
    pivots,
    block_highest,
    num_gathered,
    total_weights,
    gathered,
    gathered_tokens,
    vocab_size,
    ROOM: tl.constexpr,
    FEW: tl.constexpr,
    HAS_CHANGED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0)
    start(OVERLAPS)
    of = tl.load(rows + row)
    row_temperature, row_k, row_p, is_truncated = truncation_of(of, temperature, top_k, top_p, vocab_size)
    if is_truncated & (tl.load(highest + row) < float("inf")):
        count = tl.load(num_gathered + row)
        if count <= FEW:
            is_drawn = _draw_gathered(
                row, of, row_temperature, row_k, row_p, count, min_p, seeds, positions, tokens, highest, total_weights,
                gathered, gathered_tokens, vocab_size, ROOM, FEW,
            )  # fmt: skip
            if not is_drawn:
                tl.store(num_gathered + row, ROOM + 1)


@triton.jit(do_not_specialize_on_alignment=_BY_ROW)
def _search(
    logits,
    changed,
    is_changed,
    rows,
    temperature,
    top_k,
    top_p,
    min_p,
    seeds,
    positions,
    tokens,
    highest,
    pivots,
    block_highest,
    num_gathered,
    total_weights,
    gathered,
    gathered_tokens,
    vocab_size,
    ROOM: tl.constexpr,
    FEW: tl.constexpr,
    TILE: tl.constexpr,
    HAS_CHANGED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0)
    start(OVERLAPS)
    of = tl.load(rows + row)
    of_row = logits_of(row, logits, changed, is_changed, vocab_size, HAS_CHANGED)
    row_temperature, row_k, row_p, is_truncated = truncation_of(of, temperature, top_k, top_p, vocab_size)
    count = tl.load(num_gathered + row)
    is_truncated &= tl.load(highest + row) < float("inf")
    is_drawn = not is_truncated
    if is_truncated & (count <= ROOM):
        is_drawn = count <= FEW
        if not is_drawn:
            is_drawn = _draw_gathered(
                row, of, row_temperature, row_k, row_p, count, min_p, seeds, positions, tokens, highest, total_weights,
                gathered, gathered_tokens, vocab_size, ROOM, ROOM,
            )  # fmt: skip
    if not is_drawn:
        row_highest = tl.load(highest + row)
        scale = scale_of(row_temperature)
        farthest = tl.full((), 0x7FFFFFFF, tl.int32)
        if row_k > 0:
            wanted = row_k.to(tl.float64)
            farthest = farthest_of_row(of_row, vocab_size, row_highest, scale, wanted, True, TILE)
        if row_p < 1.0:
            left = weight_of_row(of_row, vocab_size, row_highest, scale, farthest, TILE)
            wanted = left.to(tl.float64) * row_p.to(tl.float64)
            of_p = farthest_of_row(of_row, vocab_size, row_highest, scale, wanted, False, TILE)
            farthest = tl.minimum(farthest, of_p)
        key = key_of(seeds, positions, row, of)
        least_weight = tl.load(min_p + of).to(tl.float64) * MOST
        _value, token = best_draw(
            of_row, 0, vocab_size, vocab_size, 0, row_highest, row_temperature, farthest, least_weight, key, TILE
        )
        _store_token(tokens, row, token, vocab_size)

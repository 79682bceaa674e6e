"""Which experts each token goes through, and the list of what each expert has to do: two launches.

    route     the router's product with the norm folded in, split along its inputs; the last program of some tokens to
              finish adds the parts in their order, and chooses the experts
    arrange   sorts the pairs (token, one of its experts) by expert, cuts them into tiles, and normalizes the tokens

A pair's number is token * k + rank. Nothing is counted by atomics: the order is that of the numbers, every time.

Twins: `raypp.ops.backend.choose_experts`, and `arrange` of tests/gpu/reference_ops.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from raypp.ops.backend import Router
from raypp.ops.cuda.kernel_launch import Device, Workspace, arrives_last, fence_shared, start
from raypp.ops.cuda.projection import load, load_vector
from raypp.ops.cuda.token_quantization import in_8_bits
from raypp.ops.weight import WeightKind

SCALED = 128
"""So many inputs in 8 bits share a scale."""

_MAX_SPLITS = 16
_INVARIANT_SPLITS = 4  # where they must not depend on the number of tokens
_SPLIT_INPUTS = 256  # loaded at once, before the tokens are there
_MOST_SORTED_AT_ONCE = 4096
_SEGMENT = 8192  # pairs that a program puts into their places
_MOST_COMPARED = 1 << 15  # pairs with experts, by a program
_MOST_PROGRAMS = 1024  # that normalize tokens


@dataclass(frozen=True)
class Routed:
    """Each token's experts, the most likely first.

    On a member with whole experts they are counted from its first one; those of other members have the number behind
    its last one, and no weight.
    """

    experts: torch.Tensor  # [T, k] int32
    weights: torch.Tensor  # [T, k] float32
    has_others: bool = False  # whether some may be other members'


@dataclass(frozen=True)
class Inputs:
    """The inputs of a product as its weight's kind wants them.

    plain   as they come
    fp8     in float8_e4m3fn, with a scale per row and 128 inputs
    """

    values: torch.Tensor  # [n, K]
    scale: torch.Tensor | None = None  # [n, ceil(K / 128)] float32, of fp8

    @classmethod
    def empty(cls, num_rows: int, num_inputs: int, kind: WeightKind, like: torch.Tensor) -> Inputs:
        """Return room for them, in the type of `like` unless the kind has its own."""
        dtype = torch.float8_e4m3fn if kind == "fp8" else like.dtype
        values = torch.empty(num_rows, num_inputs, dtype=dtype, device=like.device)
        if kind != "fp8":
            return cls(values)
        num_scales = triton.cdiv(num_inputs, SCALED)
        return cls(values, torch.empty(num_rows, num_scales, dtype=torch.float32, device=like.device))


@dataclass(frozen=True)
class Arranged:
    """The pairs by expert, in tiles of one expert each, and the tokens normalized."""

    normed: Inputs  # [T, H]
    pairs: torch.Tensor  # [T * k] int32: numbers of pairs, those of an expert side by side; others' are left out
    tiles: torch.Tensor  # [3, most tiles] int32: expert (-1: no tile), first place in `pairs`, number of pairs
    tile_rows: int  # the most pairs of a tile


def most_tiles(num_pairs: int, num_experts: int, tile_rows: int) -> int:
    """Return how many places for tiles there are, however the pairs are spread over experts."""
    if _is_tight(num_pairs, num_experts):
        return (num_pairs + min(num_pairs, num_experts) * (tile_rows - 1)) // tile_rows
    return num_pairs // tile_rows + num_experts


def _is_tight(num_pairs: int, num_experts: int) -> bool:
    """Return whether each program counts every expert's pairs, so that no place before the last tile is empty."""
    return num_pairs * num_experts <= _MOST_COMPARED


def route(
    x: torch.Tensor, router: Router, eps: float, device: Device, workspace: Workspace, own: range | None = None
) -> Routed:
    """Return the experts of each token by its norm.

    Shapes: x [T, H] contiguous, T at least 1; the router's weight [E, H] is of x's type, and has the norm's folded in.

    Args:
        x: The tokens.
        router: Chooses of all experts.
        eps: Of the norm.
        device: Where it runs.
        workspace: For what several programs share.
        own: The member's experts; None: all.
    """
    weight, routing, bias, correction = router.weight, router.routing, router.bias, router.correction
    scales = router.expert_scales
    (num_tokens, num_inputs), num_experts, chosen = x.shape, len(weight), routing.num_chosen
    has_groups = routing.num_groups > 1
    tile_tokens = 8 if num_tokens <= 256 or device.is_invariant else 16 if num_tokens <= 1024 or has_groups else 32
    padded_experts = max(16, triton.next_power_of_2(num_experts))
    strip_experts = min(64, padded_experts)
    num_tiles, num_strips = triton.cdiv(num_tokens, tile_tokens), padded_experts // strip_experts
    inputs = min(_SPLIT_INPUTS if tile_tokens == 8 else 128, max(16, triton.next_power_of_2(num_inputs)))
    most_splits = max(1, 2 * device.num_processors // (num_tiles * num_strips))
    if device.is_invariant:
        most_splits = _INVARIANT_SPLITS
    num_splits = min(_MAX_SPLITS, triton.next_power_of_2(most_splits + 1) // 2, triton.cdiv(num_inputs, inputs))
    floats = (num_tiles * num_splits * tile_tokens, padded_experts + 1)  # logits, and sums of squares behind all
    partial = torch.empty(floats, dtype=torch.float32, device=x.device)
    experts = torch.empty(num_tokens, chosen, dtype=torch.int32, device=x.device)
    weights = torch.empty(num_tokens, chosen, dtype=torch.float32, device=x.device)
    assert num_tiles <= workspace.counters.numel()
    _route[(num_strips, num_splits, num_tiles)](
        x,
        weight,
        x if bias is None else bias,
        x if correction is None else correction,
        x if scales is None else scales,
        eps,
        partial,
        partial.numel() - num_tiles * num_splits * tile_tokens,
        workspace.counters,
        experts,
        weights,
        num_tokens,
        num_inputs,
        0 if own is None else own.start,
        EXPERTS=num_experts,
        OWN=num_experts if own is None else len(own),
        CHOSEN=chosen,
        CHOSEN_PADDED=triton.next_power_of_2(chosen),
        HAS_BIAS=bias is not None,
        HAS_CORRECTION=correction is not None,
        HAS_SCALES=scales is not None,
        HAS_SIGMOID=routing.has_sigmoid,
        GROUPS=routing.num_groups,
        CHOSEN_GROUPS=routing.num_chosen_groups,
        RANKING=routing.num_ranking,
        NORMALIZES=routing.normalizes,
        SCALING=routing.scaling,
        IS_HASHED=routing.is_even,
        TOKENS=tile_tokens,
        STRIP=strip_experts,
        STRIPS=num_strips,
        SPLITS=num_splits,
        INPUTS=inputs,
        IS_EVEN=num_inputs % (inputs * num_splits) == 0,
        OVERLAPS=device.has_dependent_launch,
        num_warps=8 if has_groups and tile_tokens > 8 else 4,  # several numbers for each expert
        num_stages=3,
        **device.launch_options,
    )
    return Routed(experts, weights, own is not None)


def arrange(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    routed: Routed,
    num_experts: int,
    tile_rows: int,
    kind: WeightKind,
    device: Device,
) -> Arranged:
    """Return what the products need; `kind` is that of the first one's weight.

    Pairs of other members are in no tile. Shapes: x [T, H] contiguous, T at least 1; norm_weight [H], None: x as it is.
    """
    num_tokens, size = x.shape
    num_pairs = routed.experts.numel()
    num_tiles = most_tiles(num_pairs, num_experts, tile_rows)
    normed = Inputs.empty(num_tokens, size, kind, x)
    pairs = torch.empty(num_pairs, dtype=torch.int32, device=x.device)
    tiles = torch.empty(3, num_tiles, dtype=torch.int32, device=x.device)
    block = max(SCALED, triton.next_power_of_2(size))
    num_segments = triton.cdiv(num_pairs, _SEGMENT)
    num_programs = max(num_experts * num_segments, min(num_tokens, _MOST_PROGRAMS))
    _arrange[(num_programs,)](
        x,
        x if norm_weight is None else norm_weight,
        eps,
        normed.values,
        x if normed.scale is None else normed.scale,
        size,
        num_tokens,
        routed.experts,
        num_pairs,
        pairs,
        tiles,
        num_tiles,
        EXPERTS=num_experts,
        EXPERTS_PADDED=triton.next_power_of_2(num_experts),
        IS_TIGHT=_is_tight(num_pairs, num_experts),
        TILE_ROWS=tile_rows,
        AT_ONCE=min(_MOST_SORTED_AT_ONCE, max(32, triton.next_power_of_2(num_pairs))),
        SEGMENT=_SEGMENT,
        IS_CUT=num_segments > 1,
        BLOCK=block,
        HAS_NORM=norm_weight is not None,
        KIND=kind,
        SCALED=SCALED,
        OVERLAPS=device.has_dependent_launch,
        num_warps=min(8, max(4, block // 512)),
        **device.launch_options,
    )
    return Arranged(normed, pairs, tiles, tile_rows)


@triton.jit
def _hashed(logits, expert):
    """Return `raypp.ops.backend._hashed` of logits [T, E]: int64, not negative."""
    mixed = logits.to(tl.uint32, bitcast=True) + ((expert + 1).to(tl.uint32) * 0x9E3779B9)[None, :]
    mixed = (mixed ^ (mixed >> 16)) * 0x7FEB352D
    mixed = (mixed ^ (mixed >> 15)) * 0x846CA68B
    return (mixed ^ (mixed >> 16)).to(tl.int64)


@triton.jit
def _of_open_groups(
    ranks, index, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, RANKING: tl.constexpr
):
    """Return ranks [T, E], minus infinity in groups whose RANKING best have no sum among the CHOSEN_GROUPS largest."""
    group = index // (EXPERTS // GROUPS)
    sums = ()
    own = tl.zeros_like(ranks)
    for number in tl.static_range(GROUPS):
        others = tl.where((group == number)[None, :], ranks, float("-inf"))
        total = tl.zeros((ranks.shape[0],), tl.float32)
        for _ in tl.static_range(RANKING):
            best = tl.max(others, 1)
            total += best
            place = tl.min(tl.where(others == best[:, None], index[None, :], ranks.shape[1]), 1)
            others = tl.where(index[None, :] == place[:, None], float("-inf"), others)
        sums += (total,)
        own = tl.where((group == number)[None, :], total[:, None], own)
    ahead = tl.zeros(ranks.shape, tl.int32)
    for number in tl.static_range(GROUPS):
        total = sums[number][:, None]
        ahead += ((total > own) | ((total == own) & (number < group)[None, :])).to(tl.int32)
    return tl.where(ahead < CHOSEN_GROUPS, ranks, float("-inf"))


@triton.jit(do_not_specialize=["num_tokens", "squares_offset", "first_own"])
def _route(
    x,
    router,
    bias,
    correction,
    scales,
    eps,
    partial,
    squares_offset,
    counters,
    experts,
    weights,
    num_tokens,
    num_inputs,
    first_own,
    EXPERTS: tl.constexpr,
    OWN: tl.constexpr,
    CHOSEN: tl.constexpr,
    CHOSEN_PADDED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_CORRECTION: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_SIGMOID: tl.constexpr,
    GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    RANKING: tl.constexpr,
    NORMALIZES: tl.constexpr,
    SCALING: tl.constexpr,
    IS_HASHED: tl.constexpr,
    TOKENS: tl.constexpr,
    STRIP: tl.constexpr,
    STRIPS: tl.constexpr,
    SPLITS: tl.constexpr,
    INPUTS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    PADDED: tl.constexpr = STRIP * STRIPS
    strip, split, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    expert = strip * STRIP + tl.arange(0, STRIP)
    token = tile * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, INPUTS)
    # Past the end, experts and tokens are computed again, and not used.
    cell = tl.minimum(expert, EXPERTS - 1)[:, None] * num_inputs + column[None, :]
    x_cell = tl.minimum(token, num_tokens - 1).to(tl.int64)[:, None] * num_inputs + column[None, :]
    split_inputs = tl.cdiv(tl.cdiv(num_inputs, INPUTS), SPLITS) * INPUTS
    first = split * split_inputs
    last = tl.minimum(first + split_inputs, num_inputs)
    inside = (first + column < last)[None, :]
    first_piece = load(router + cell + first, inside, IS_EVEN)
    start(OVERLAPS)
    value = load(x + x_cell + first, inside, IS_EVEN)
    squares = tl.sum(value.to(tl.float32) * value.to(tl.float32), 1)
    total = tl.dot(first_piece, tl.trans(value))
    for begin in range(first + INPUTS, last, INPUTS):
        inside = (begin + column < last)[None, :]
        value = load(x + x_cell + begin, inside, IS_EVEN)
        piece = load(router + cell + begin, inside, IS_EVEN)
        # Loaded once more: a buffer that is also read by others than the product is filled again too early, while the
        # product is under way (Triton 3.6 and 3.7; tests/unit/ops/compile_kernels.py looks for it).
        again = tl.load(x + x_cell + begin, mask=None if IS_EVEN else inside, cache_modifier=".ca").to(tl.float32)
        squares += tl.sum(again * again, 1)
        fence_shared(OVERLAPS)
        total = tl.dot(piece, tl.trans(value), total)

    row = tl.arange(0, TOKENS)
    part = (tile * SPLITS + split) * TOKENS + row
    is_token = token < num_tokens
    tl.store(partial + part[:, None] * PADDED + expert[None, :], tl.trans(total), mask=is_token[:, None])
    if strip == 0:
        tl.store(partial + squares_offset + part, squares)
    if arrives_last(counters + tile, STRIPS * SPLITS):
        index = tl.arange(0, PADDED)
        logits = tl.zeros((TOKENS, PADDED), tl.float32)
        squares = tl.zeros((TOKENS,), tl.float32)
        for other in tl.static_range(SPLITS):  # written out, so that the parts come at once
            part = (tile * SPLITS + other) * TOKENS + row
            cell_of_part = partial + part[:, None] * PADDED + index[None, :]
            logits += tl.load(cell_of_part, mask=is_token[:, None], other=0.0, cache_modifier=".cg")
            squares += tl.load(partial + squares_offset + part, cache_modifier=".cg")
        logits *= tl.rsqrt(squares / num_inputs + eps)[:, None]
        is_expert = (index < EXPERTS)[None, :]
        logits += load_vector(bias, index, EXPERTS, HAS_BIAS)[None, :]
        logits = tl.where(is_expert, logits, float("-inf"))
        if HAS_SIGMOID:
            likely = tl.sigmoid(logits)
        else:
            likely = tl.exp(logits - tl.max(logits, 1)[:, None])
            likely /= tl.sum(likely, 1)[:, None]
        ranks = likely + load_vector(correction, index, EXPERTS, HAS_CORRECTION)[None, :]
        if GROUPS > 1:
            ranks = _of_open_groups(ranks, index, EXPERTS, GROUPS, CHOSEN_GROUPS, RANKING)
        IS_LIKELY: tl.constexpr = not (IS_HASHED or HAS_CORRECTION or GROUPS > 1)
        # One number holds the key and the expert, so that finding the largest gives both; the lower of equal experts.
        if IS_HASHED:
            key = _hashed(logits, index)
        else:  # in the order of numbers, and not negative
            bits = ranks.to(tl.int32, bitcast=True)
            key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 0x80000000
        ranked = tl.where(is_expert, (key << 16) | (PADDED - 1 - index)[None, :], -1)
        rank = tl.arange(0, CHOSEN_PADDED)
        found = tl.zeros((TOKENS, CHOSEN_PADDED), tl.int32)
        weight = tl.zeros((TOKENS, CHOSEN_PADDED), tl.float32)
        for place in range(CHOSEN):
            best = tl.max(ranked, 1)
            ranked = tl.where(ranked == best[:, None], -1, ranked)
            # What is no number gives any expert.
            number = tl.minimum(PADDED - 1 - (best & 0xFFFF), EXPERTS - 1).to(tl.int32)
            found = tl.where(rank[None, :] == place, number[:, None], found)
            if IS_LIKELY:
                share = ((best >> 16) - 0x80000000).to(tl.int32).to(tl.float32, bitcast=True)
            else:
                share = tl.sum(tl.where(index[None, :] == number[:, None], likely, 0.0), 1)
            weight = tl.where(rank[None, :] == place, share[:, None], weight)
        if NORMALIZES:
            weight /= tl.sum(weight, 1)[:, None]
        weight *= SCALING
        if HAS_SCALES:
            weight *= tl.load(scales + found)
        if OWN < EXPERTS:
            found -= first_own
            found = tl.where((found >= 0) & (found < OWN), found, OWN)
            weight = tl.where(found < OWN, weight, 0.0)
        pair = token.to(tl.int64)[:, None] * CHOSEN + rank[None, :]
        mask = is_token[:, None] & (rank < CHOSEN)[None, :]
        tl.store(experts + pair, found, mask=mask)
        tl.store(weights + pair, weight, mask=mask)


@triton.jit(do_not_specialize=["num_tokens", "num_pairs", "num_tiles"])
def _arrange(
    x,
    norm_weight,
    eps,
    normed,
    normed_scale,
    size,
    num_tokens,
    experts,
    num_pairs,
    pairs,
    tiles,
    num_tiles,
    EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    IS_TIGHT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    SEGMENT: tl.constexpr,
    IS_CUT: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
    KIND: tl.constexpr,
    SCALED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    program = tl.program_id(0)
    expert, segment = program, 0
    if IS_CUT:
        num_segments = tl.cdiv(num_pairs, SEGMENT)
        expert, segment = program // num_segments, program % num_segments
    column = tl.arange(0, BLOCK)
    inside = column < size
    if HAS_NORM:
        factor = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
    start(OVERLAPS)
    for token in range(program, num_tokens, tl.num_programs(0)):
        row = tl.cast(token, tl.int64) * size
        value = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
        if HAS_NORM:
            value *= tl.rsqrt(tl.sum(value * value, 0) / size + eps) * factor
        if KIND == "fp8":
            group = tl.arange(0, BLOCK // SCALED)
            value, scale = in_8_bits(tl.reshape(value, (BLOCK // SCALED, SCALED)), 1)
            value = tl.reshape(value, (BLOCK,))
            num_scales = tl.cdiv(size, SCALED)
            tl.store(normed_scale + tl.cast(token, tl.int64) * num_scales + group, scale, mask=group < num_scales)
        tl.store(normed + row + column, value.to(normed.dtype.element_ty), mask=inside)
    if expert < EXPERTS:
        index = tl.arange(0, AT_ONCE)
        before = tl.zeros((AT_ONCE,), tl.int32)  # pairs of experts with lower numbers
        own = tl.zeros((AT_ONCE,), tl.int32)
        own_before = tl.zeros((AT_ONCE,), tl.int32)  # in segments before this one
        for begin in range(0, num_pairs, AT_ONCE):
            of_pair = tl.load(experts + begin + index, mask=begin + index < num_pairs, other=EXPERTS)
            before += (of_pair < expert).to(tl.int32)
            is_own = (of_pair == expert).to(tl.int32)
            own += is_own
            if IS_CUT:
                own_before += tl.where(begin < segment * SEGMENT, is_own, 0)
        num_before, num_own = tl.sum(before, 0), tl.sum(own, 0)
        num_tiles_own = (num_own + TILE_ROWS - 1) // TILE_ROWS
        if segment == 0:
            some = tl.arange(0, 32)
            if IS_TIGHT:
                # Tiles follow each other.
                other = tl.arange(0, EXPERTS_PADDED)
                counts = tl.zeros((EXPERTS_PADDED,), tl.int32)
                few = tl.arange(0, 32)
                for begin in range(0, num_pairs, 32):
                    of_pair = tl.load(experts + begin + few, mask=begin + few < num_pairs, other=EXPERTS)
                    counts += tl.sum((of_pair[None, :] == other[:, None]).to(tl.int32), 1)
                first_tile = tl.sum(tl.where(other < expert, (counts + TILE_ROWS - 1) // TILE_ROWS, 0), 0)
                end_tile = first_tile + num_tiles_own
            else:
                # Each expert has a place more than the tiles that its pairs fill.
                first_tile = num_before // TILE_ROWS + expert
                end_tile = (num_before + num_own) // TILE_ROWS + expert + 1
            if expert == EXPERTS - 1:  # it marks the places that are left, as pairs of other members leave them
                end_tile = num_tiles
            for begin in range(0, end_tile - first_tile, 32):
                number = begin + some
                mask = number < end_tile - first_tile
                tile = tiles + first_tile + number
                tl.store(tile, tl.where(number < num_tiles_own, expert, -1), mask=mask)
                tl.store(tile + num_tiles, num_before + number * TILE_ROWS, mask=mask)
                tl.store(tile + 2 * num_tiles, tl.minimum(num_own - number * TILE_ROWS, TILE_ROWS), mask=mask)
        place = num_before
        if IS_CUT:
            place += tl.sum(own_before, 0)
        for begin in range(segment * SEGMENT, tl.minimum(num_pairs, (segment + 1) * SEGMENT), AT_ONCE):
            pair = begin + index
            is_own = (tl.load(experts + pair, mask=pair < num_pairs, other=EXPERTS) == expert).to(tl.int32)
            tl.store(pairs + place + tl.cumsum(is_own, 0) - 1, pair, mask=is_own > 0)
            place += tl.sum(is_own, 0)

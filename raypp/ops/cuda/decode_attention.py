"""Attention of decode rows over the paged cache in one launch, split along the context (flash decoding).

    program (row, KV head, split)   the query heads that share the KV head, and all of the row's query tokens, against
                                    the split's share of the context, with a running softmax; where these are too many
                                    for a program, several have some of the heads each
    the last split to finish        combines the splits' results in a fixed order: the same bits every time

Lengths and block tables are read on the device, so a captured launch serves rows of any length. The number of splits
depends on the numbers of rows and of their query tokens alone. Sources: FlashAttention-2 (arXiv:2307.08691) for the
running softmax, Flash-Decoding (Dao et al. 2023) for the splits.

A cache in 8 bits is read as words of 16, two columns of a head each. So tiles travel and are transposed as those of 16
bits are, and in registers both halves of a word become float16, which holds them exactly: `_halves`. Columns of even
and odd numbers are multiplied apart. Queries are float16 then, too, divided by a power of two so that none is too
large. The scale of keys is part of that of the scores, the scale of values comes last.

With a window the range that is split begins with the block of the first token that the row's first query sees; what
lies before is not read. Sinks are where the first split's softmax begins.

Twin: `decode_attention` of tests/gpu/reference_ops.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from raypp.errors import ConfigError
from raypp.ops.attention import Heads, Rotation
from raypp.ops.cuda.between_products import as_stored, narrowed
from raypp.ops.cuda.kernel_launch import Device, Workspace, arrives_last, start
from raypp.ops.kv_cache import FP8, LayerCache

_MAX_SPLITS = 16
_PROGRAMS_AT_ONCE = 6  # of a processor, with one query token per row
_PROGRAMS_OF_LARGE_TILES_AT_ONCE = 3  # of 128 tokens in 8 bits
_MOST_FLOATS_OF_LARGE_TILES = 32 * 128  # of queries, beside tiles of 128 tokens
_QUERIES_OF_MOST_WARPS, _MOST_WARPS = 256, 16
_SHARED_OF_MOST_WARPS = range(160 << 10, 200 << 10)
"""Of compute capability 8.0, for which 8 warps keep 6 KiB of 256 queries a thread on the stack, and 16 half a KiB."""
_MOST_FLOATS_OF_FEW_WARPS = 64 * 128  # of queries, whose weighted values four warps keep in registers
_LEAST_OF_A_SPLIT = 128  # tokens: combining more splits takes longer than they save
_MOST_COLUMNS_OF_WHOLE_TILES = 256  # of larger heads tiles have fewer tokens
_MOST_QUERIES_OF_LARGE_HEADS = 64  # with more, their weighted values go through shared memory, in 32 bits
_MIN_QUERIES = 16  # the smallest tile of a matrix product
_LOG2_E: tl.constexpr = tl.constexpr(math.log2(math.e))
_TWO_LOG2_E: tl.constexpr = tl.constexpr(2 * math.log2(math.e))
_MOST_QUERIES_OF_WEIGHTS = 64  # whose weights go through shared memory, with heads of 128 or less
_MIN_COLUMNS = 32  # of a head: half of them are multiplied at once where the cache is in 8 bits


_HALVES_ASM = """
    {
    .reg .b32 sorted;
    .reg .b16 low, high;
    prmt.b32 sorted, $2, 0, 0x3120;
    mov.b32 {low, high}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
    }
"""
"""Of two words, the low numbers as one register of float16, and the high ones. Compute capability 8.9."""


@dataclass(frozen=True)
class DecodeTuning:
    """How the work is cut.

    Args:
        num_splits: Parts of the context.
        tile_tokens: Keys that are multiplied at once.
        num_warps: Of a program.
        num_stages: Tiles under way from memory.
        max_registers: Of a thread: the fewer, the more programs are on a processor at once. None: as many as it takes.
        num_shares: Programs that have the query heads of a KV head.
    """

    num_splits: int
    tile_tokens: int = 64
    num_warps: int = 4
    num_stages: int = 3
    max_registers: int | None = None
    num_shares: int = 1


def tune_decode(
    num_rows: int, num_kv_heads: int, device: Device, query_len: int = 1, query_floats: int = 1, cache_bytes: int = 2
) -> DecodeTuning:
    """Return the cut for a number of rows: enough programs for all processors, and not many more.

    Figures: docs/design/0045-gpu-kernels.md. With several query tokens per row a split's result is larger, and so is
    the price of combining them. `query_floats` are those of a program's queries, which say how large tiles may be.
    In 8 bits tiles are large: what a tile takes besides its products counts for more there.
    """
    num_pairs, num_processors = max(1, num_rows * num_kv_heads), device.num_processors
    if query_len > 1:
        num_splits = _power_of_2(num_processors / num_pairs, most=_MAX_SPLITS // 2)
        is_large = num_splits == 1 and query_floats <= _MOST_FLOATS_OF_LARGE_TILES
        num_warps = 4 if query_floats <= _MOST_FLOATS_OF_FEW_WARPS else 8
        return DecodeTuning(num_splits, 128 if is_large else 64, num_warps, num_stages=2)
    has_large_tiles = cache_bytes == 1 and query_floats <= _MOST_FLOATS_OF_LARGE_TILES
    if num_pairs > 2 * num_processors:
        if has_large_tiles:  # but where smaller ones are all there at once, and large ones are not
            at_once = num_pairs / num_processors
            is_small = _PROGRAMS_OF_LARGE_TILES_AT_ONCE < at_once <= _PROGRAMS_AT_ONCE - 1
            return DecodeTuning(1, 64 if is_small else 128, num_stages=2)
        rounds = num_pairs / (_PROGRAMS_AT_ONCE * num_processors)
        return DecodeTuning(2 if 1 < rounds <= 1.25 else 1, num_stages=2)  # of a last round most would be idle
    num_splits = _power_of_2(2 * num_processors / num_pairs, most=_MAX_SPLITS)
    num_splits = max(num_splits, 4) if num_pairs < num_processors else num_splits
    return DecodeTuning(num_splits, 128, num_stages=2) if has_large_tiles else DecodeTuning(num_splits)


def _power_of_2(wanted: float, most: int) -> int:
    """Return the power of two next to the wanted number of splits; a tenth too few are enough."""
    return min(most, 1 << max(0, math.ceil(math.log2(wanted / 1.1))))


class TritonDecode:
    """Decode attention of heads of one number and size.

    Args:
        num_heads: Hq.
        num_kv_heads: Hk.
        head_dim: Dk.
        max_query_len: The most query tokens of a row, 1 + K.
        device: Where it runs.
        workspace: For the splits' results.
        value_dim: Dv; None: as `head_dim`.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        max_query_len: int,
        device: Device,
        workspace: Workspace,
        value_dim: int | None = None,
    ) -> None:
        value_dim = head_dim if value_dim is None else value_dim
        self._num_kv_heads = num_kv_heads
        self._group = num_heads // num_kv_heads
        self._head_dim = head_dim
        self._value_dim = value_dim
        self._device = device
        self._workspace = workspace
        self._cuts: dict[tuple[int, int, int], DecodeTuning] = {}  # by rows, their tokens and bytes of an element
        self._block_d, self._block_dv = (max(_MIN_COLUMNS, triton.next_power_of_2(n)) for n in (head_dim, value_dim))
        query_floats, least = self._block_dv + 2, _MAX_SPLITS * num_kv_heads
        for query_len, per_processor in ((1, 3 * _PROGRAMS_AT_ONCE), (max_query_len, 2)):
            num_parts = max(least, per_processor * device.num_processors)  # as many as `tune_decode` ever makes
            workspace.reserve(num_parts * self._filled(query_len) * query_floats)

    def __call__(
        self,
        q: torch.Tensor,
        cache: LayerCache,
        seq_lens: torch.Tensor,
        block_tables: torch.Tensor,
        query_len: int,
        heads: Heads,
        out: torch.Tensor,
        tuning: DecodeTuning | None = None,
    ) -> None:
        """Write the attention's output to `out`.

        Shapes: q [R * query_len, Hq, Dk] and out [R * query_len, Hq, Dv] contiguous; the cache of q's type or FP8, this
        step's tokens included; seq_lens [R] int32, this step's tokens included; block_tables [R, W] int32 contiguous.
        Lengths past the table's end are cut there. `out` may be of fewer bits.
        """
        self._launch(q, heads, None, cache, seq_lens, block_tables, query_len, out, tuning)

    def from_projection(
        self,
        qkv: torch.Tensor,
        heads: Heads,
        rope: Rotation,
        slot_mapping: torch.Tensor,
        cache: LayerCache,
        seq_lens: torch.Tensor,
        block_tables: torch.Tensor,
        query_len: int,
        out: torch.Tensor,
        tuning: DecodeTuning | None = None,
    ) -> None:
        """Do what `append_heads` does, and write the attention's output to `out`, in one launch.

        Every program makes the queries anew, which pays while rows are few.

        Shapes: qkv [R * query_len, `heads.width`]; rope: of `rotation_table`; slot_mapping
        [R * query_len] int64; the others as above.
        """
        self._launch(qkv, heads, (rope, slot_mapping), cache, seq_lens, block_tables, query_len, out, tuning)

    def _launch(
        self,
        source: torch.Tensor,
        heads: Heads,
        fresh: tuple[Rotation, torch.Tensor] | None,
        cache: LayerCache,
        seq_lens: torch.Tensor,
        block_tables: torch.Tensor,
        query_len: int,
        out: torch.Tensor,
        tuning: DecodeTuning | None,
    ) -> None:
        num_rows = block_tables.shape[0]
        if not num_rows:
            return
        tuning = tuning or self.cut(num_rows, query_len, cache.keys.element_size())
        block_dv, filled, num_shares = self._block_dv, self._filled(query_len, tuning.num_shares), tuning.num_shares
        num_pairs = num_rows * self._num_kv_heads * num_shares
        counters, num_floats = self._workspace.counters, num_pairs * tuning.num_splits * filled * (block_dv + 2)
        assert num_pairs <= counters.numel()
        assert tuning.num_splits == 1 or num_floats <= self._workspace.floats.numel(), "more splits than reserved"
        norm, cos, sin, slot_mapping = None, source, source, source
        if fresh is not None:
            norm, cos, sin, slot_mapping = heads.norm, fresh[0].cos, fresh[0].sin, fresh[1]
        k_scale, v_scale, is_fp8 = 1.0, 1.0, cache.keys.dtype == FP8
        if is_fp8:
            k_scale, v_scale = heads.k_scale, heads.v_scale
        keys, values = (side.view(torch.int16) if is_fp8 else side for side in cache)
        scale_log2 = heads.scale * k_scale * math.log2(math.e)
        soft_cap = heads.soft_cap or 0.0
        _decode_attention[(tuning.num_splits, self._num_kv_heads * num_shares, num_rows)](
            source,
            source if norm is None else norm.q_weight,
            source if norm is None else norm.k_weight,
            0.0 if norm is None else norm.eps,
            cos,
            sin,
            slot_mapping,
            keys,
            values,
            seq_lens,
            block_tables,
            block_tables.shape[1],
            out,
            self._workspace.floats,
            counters,
            scale_log2,
            soft_cap * math.log2(math.e),
            source if heads.sinks is None else heads.sinks,
            heads.window or 0,
            1.0 / k_scale,
            1.0 / v_scale,
            v_scale,
            QUERY_LEN=query_len,
            GROUP=self._group // num_shares,
            SHARES=num_shares,
            NUM_KV_HEADS=self._num_kv_heads,
            D=self._head_dim,
            BLOCK_D=self._block_d,
            DV=self._value_dim,
            BLOCK_DV=block_dv,
            BLOCK_SIZE=keys.shape[2],
            QUERIES=max(_MIN_QUERIES, filled),
            FILLED=filled,
            PARTS_AT_ONCE=_parts_at_once(tuning.num_splits, filled * block_dv),
            FRESH=max(_MIN_QUERIES, triton.next_power_of_2(query_len)),
            TILE=tuning.tile_tokens,
            LEAST=max(_LEAST_OF_A_SPLIT, tuning.tile_tokens),
            SPLITS=tuning.num_splits,
            IS_PROJECTION=fresh is not None,
            HAS_NORM=norm is not None,
            HAS_VALUE_NORM=norm is not None and norm.has_values,
            ARE_KEYS=heads.values_are_keys,
            HAS_WINDOW=heads.window is not None,
            HAS_CAP=heads.soft_cap is not None,
            HAS_SINKS=heads.sinks is not None,
            CLAMPS=out.dtype != source.dtype,
            IS_FP8=is_fp8,
            HALVES_ASM="" if self._device.is_interpreter else _HALVES_ASM,
            OVERLAPS=self._device.has_dependent_launch,
            num_warps=tuning.num_warps,
            num_stages=tuning.num_stages,
            maxnreg=tuning.max_registers,
            **self._device.launch_options,
        )

    def cut(self, num_rows: int, query_len: int, cache_bytes: int = 2) -> DecodeTuning:
        """Return how so many rows of so many tokens are cut, over a cache of so many bytes per element.

        Raises:
            ConfigError: a row's tokens and one query head take more shared memory than a program can have.
        """
        of_step = (num_rows, query_len, cache_bytes)
        if (known := self._cuts.get(of_step)) is not None:
            return known  # all layers of a step ask for the same one
        shares = [n for n in range(1, self._group + 1) if self._group % n == 0]
        cuts = (self._cut(*of_step, num_shares) for num_shares in shares)
        fitting = next((cut for cut in cuts if cut is not None), None)
        if fitting is None:
            most = max(n for n in range(query_len) if self._cut(num_rows, 1 + n, cache_bytes, self._group))
            raise ConfigError(
                "attention over a row's drafts does not fit the shared memory of this GPU",
                got=f"{query_len - 1} drafts, {self._device.shared_bytes >> 10} KiB",
                expected=f"at most {most} drafts, with heads of {self._head_dim}",
                hint="a smaller speculative.num_speculative_tokens or draft_ladder",
            )
        self._cuts[of_step] = fitting
        return fitting

    def _cut(self, num_rows: int, query_len: int, cache_bytes: int, num_shares: int) -> DecodeTuning | None:
        """Return the cut with fewer stages, then smaller tiles, until shared memory holds it; None: none does."""
        filled, block_d = self._filled(query_len, num_shares), max(self._block_d, self._block_dv)
        is_large = block_d > _MOST_COLUMNS_OF_WHOLE_TILES
        if is_large and filled > _MOST_QUERIES_OF_LARGE_HEADS and num_shares < self._group:
            return None
        tile_bytes = cache_bytes if block_d <= 128 else 2  # large tiles of larger heads take too many registers
        num_kv_heads = self._num_kv_heads * num_shares
        tuning = tune_decode(num_rows, num_kv_heads, self._device, query_len, filled * block_d, tile_bytes)
        tuning = replace(tuning, num_shares=num_shares)
        if is_large:
            tuning = replace(tuning, tile_tokens=tuning.tile_tokens * _MOST_COLUMNS_OF_WHOLE_TILES // block_d)
        if filled >= _QUERIES_OF_MOST_WARPS and self._device.shared_bytes in _SHARED_OF_MOST_WARPS:
            tuning = replace(tuning, num_warps=_MOST_WARPS)
        queries = max(_MIN_QUERIES, filled)
        sizes = [(tuning.tile_tokens, num_stages) for num_stages in range(tuning.num_stages, 0, -1)]
        sizes += [(tile, 1) for tile in (64, 32, 16) if tile < tuning.tile_tokens]
        cuts = (replace(tuning, tile_tokens=tile, num_stages=num_stages) for tile, num_stages in sizes)
        most, sides = self._device.shared_bytes, (self._block_d, self._block_dv)
        return next((cut for cut in cuts if _shared_bytes(cut, queries, *sides, cache_bytes) <= most), None)

    def _filled(self, query_len: int, num_shares: int = 1) -> int:
        """Return the number of a program's queries, without those that only fill a tile."""
        return 1 << (query_len * self._group // num_shares - 1).bit_length()


def _shared_bytes(tuning: DecodeTuning, queries: int, block_d: int, block_dv: int, cache_bytes: int) -> int:
    """Return the shared memory of a program, as compiled for capability 8, or a little more.

    Heads of more than 256 columns keep every stage on Hopper.
    """
    keeps_all = max(block_d, block_dv) > _MOST_COLUMNS_OF_WHOLE_TILES
    tile, num_kept = tuning.tile_tokens * cache_bytes, tuning.num_stages - (not keeps_all or tuning.num_stages == 1)
    sides = tile * (num_kept * (block_d + block_dv) if num_kept else max(block_d, block_dv))  # keys, then values
    is_wide = max(block_d, block_dv) > 128 or tuning.num_warps == _MOST_WARPS
    has_weights = queries <= _MOST_QUERIES_OF_WEIGHTS or is_wide
    return sides + 2 * queries * block_d + 2 * queries * tuning.tile_tokens * has_weights


def _parts_at_once(num_splits: int, num_elements: int) -> int:
    """Return how many splits' results are added at once. More take more registers of each program."""
    at_once = min(num_splits, max(1, max(2048, 256 * num_splits) // num_elements))
    return 1 << (at_once.bit_length() - 1)  # an arrangement's size is a power of two


@triton.jit
def _make_head(
    cell, weight, eps, angle, cos, sin, is_there, D: tl.constexpr, BLOCK_D: tl.constexpr, HAS_NORM: tl.constexpr
):
    """Return heads normalized and rotated, [n, BLOCK_D]. `cell` points at their first element, `angle` at cos, [n]."""
    HALF: tl.constexpr = D // 2
    column = tl.arange(0, BLOCK_D)
    other = (column + HALF) % D  # what a dimension is rotated with
    mask = is_there[:, None] & (column < D)[None, :]
    value = tl.load(cell[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    partner = tl.load(cell[:, None] + other[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        inside = column < D
        scale = tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None]
        value *= scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        partner *= scale * tl.load(weight + other, mask=inside, other=0.0).to(tl.float32)[None, :]
    pair = angle[:, None] + (column % HALF)[None, :]
    sign = tl.where(column < HALF, -1.0, 1.0)[None, :]
    turned = value * tl.load(cos + pair, mask=mask, other=0.0)
    return turned + partner * sign * tl.load(sin + pair, mask=mask, other=0.0)


@triton.jit
def _soften(scores, is_visible, scale_log2, cap_log2, highest, total, HAS_CAP: tl.constexpr):
    """Take scores into a running softmax; return its highest one, its sum, the weights, and what shrinks others."""
    scores *= scale_log2
    if HAS_CAP:  # cap * tanh(scores / cap), with a tanh of powers of two
        scores = cap_log2 * (1.0 - 2.0 / (tl.exp2(scores * (_TWO_LOG2_E / cap_log2)) + 1.0))
    scores = tl.where(is_visible, scores, -1e30)
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    weights = tl.exp2(scores - new_highest[:, None])
    shrink = tl.exp2(highest - new_highest)
    return new_highest, total * shrink + tl.sum(weights, 1), weights, shrink[:, None]


@triton.jit
def attend(queries, keys, values, is_visible, scale_log2, cap_log2, highest, total, weighted, HAS_CAP: tl.constexpr):
    """Take keys and values into a running softmax: its highest score, its sum, its weighted values."""
    scores = tl.dot(queries, tl.trans(keys))
    highest, total, weights, shrink = _soften(scores, is_visible, scale_log2, cap_log2, highest, total, HAS_CAP)
    return highest, total, weighted * shrink + tl.dot(weights.to(values.dtype), values)


@triton.jit
def _attend_words(
    even_queries,
    odd_queries,
    keys,
    values,
    is_visible,
    scale_log2,
    cap_log2,
    highest,
    total,
    even,
    odd,
    HAS_CAP: tl.constexpr,
    HALVES_ASM: tl.constexpr,
):
    """Do what `attend` does with keys and values in words; `even` and `odd` are columns of the weighted values."""
    even_keys, odd_keys = _halves(keys, even_queries.dtype, HALVES_ASM)
    scores = tl.dot(odd_queries, tl.trans(odd_keys), tl.dot(even_queries, tl.trans(even_keys)))
    highest, total, weights, shrink = _soften(scores, is_visible, scale_log2, cap_log2, highest, total, HAS_CAP)
    even_values, odd_values = _halves(values, even_queries.dtype, HALVES_ASM)
    weights = weights.to(even_values.dtype)
    return highest, total, tl.dot(weights, even_values, even * shrink), tl.dot(weights, odd_values, odd * shrink)


@triton.jit
def _halves(words, dtype: tl.constexpr, HALVES_ASM: tl.constexpr):
    """Return the two float8_e4m3fn numbers of each int16, the low one first, as `dtype`; float16 by assembly."""
    if HALVES_ASM == "":
        low, high = (words & 0xFF).to(tl.uint8), ((words >> 8) & 0xFF).to(tl.uint8)
        low = low.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(dtype)
        high = high.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(dtype)
    else:
        low, high = tl.inline_asm_elementwise(
            HALVES_ASM, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    return low, high


@triton.jit
def _words(rounded, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Return float8_e4m3fn numbers [ROWS, 2 * WORDS], two as one int16."""
    low, high = tl.split(tl.reshape(rounded.to(tl.uint8, bitcast=True).to(tl.int16), (ROWS, WORDS, 2)))
    return low | (high << 8)


# The width follows the longest row of a step, and where tables, slots and lengths begin the number of its rows.
@triton.jit(
    do_not_specialize=["table_width", "window"],
    do_not_specialize_on_alignment=["slot_mapping", "seq_lens", "block_tables"],
)
def _decode_attention(
    source,
    q_weight,
    k_weight,
    eps,
    cos,
    sin,
    slot_mapping,
    key_cache,
    value_cache,
    seq_lens,
    block_tables,
    table_width,
    out,
    partial,
    counters,
    scale_log2,
    cap_log2,
    sinks,
    window,
    k_inverse,
    v_inverse,
    v_scale,
    QUERY_LEN: tl.constexpr,
    GROUP: tl.constexpr,
    SHARES: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    FILLED: tl.constexpr,
    PARTS_AT_ONCE: tl.constexpr,
    FRESH: tl.constexpr,
    TILE: tl.constexpr,
    LEAST: tl.constexpr,
    SPLITS: tl.constexpr,
    IS_PROJECTION: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_VALUE_NORM: tl.constexpr,
    ARE_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    CLAMPS: tl.constexpr,
    IS_FP8: tl.constexpr,
    HALVES_ASM: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    PART: tl.constexpr = FILLED * (BLOCK_DV + 2)  # floats of a split's result: values, highest scores, sums
    NUM_HEADS: tl.constexpr = GROUP * SHARES * NUM_KV_HEADS
    WIDTH: tl.constexpr = NUM_HEADS * D + NUM_KV_HEADS * (D + (0 if ARE_KEYS else DV))  # of a token's projection
    FIRST_VALUE: tl.constexpr = (NUM_HEADS + (0 if ARE_KEYS else NUM_KV_HEADS)) * D
    ROW: tl.constexpr = D // 2 if IS_FP8 else D  # what the cache has of a token's key of a head: words, or columns
    BLOCK_ROW: tl.constexpr = BLOCK_D // 2 if IS_FP8 else BLOCK_D
    VALUE_ROW: tl.constexpr = DV // 2 if IS_FP8 else DV
    BLOCK_VALUE_ROW: tl.constexpr = BLOCK_DV // 2 if IS_FP8 else BLOCK_DV
    split, share, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_head = share // SHARES
    query = tl.arange(0, QUERIES)  # (query token, head of the group), the group innermost
    query_token = query // GROUP
    query_head = share * GROUP + query % GROUP
    is_query = query < QUERY_LEN * GROUP
    column = tl.arange(0, BLOCK_D)
    in_head = column < D
    row_cell = tl.arange(0, BLOCK_ROW)
    in_row = row_cell < ROW
    value_column = tl.arange(0, BLOCK_DV)
    in_value = value_column < DV
    value_cell = tl.arange(0, BLOCK_VALUE_ROW)
    in_value_row = value_cell < VALUE_ROW
    token_in_tile = tl.arange(0, TILE)
    first_token = row.to(tl.int64) * QUERY_LEN
    out_row = (first_token + query_token) * NUM_HEADS + query_head
    out_cell = out_row[:, None] * DV + value_column[None, :]
    out_mask = is_query[:, None] & in_value[None, :]
    table = block_tables + row.to(tl.int64) * table_width
    start(OVERLAPS)
    dtype: tl.constexpr = source.dtype.element_ty
    product_dtype: tl.constexpr = tl.float16 if IS_FP8 and HALVES_ASM != "" else dtype
    if IS_PROJECTION:
        head = source + (first_token + query_token) * WIDTH + query_head * D
        angle = (first_token + query_token) * (D // 2)
        queries = _make_head(head, q_weight, eps, angle, cos, sin, is_query, D, BLOCK_D, HAS_NORM).to(dtype)
    else:
        cell = out_row[:, None] * D + column[None, :]
        queries = tl.load(source + cell, mask=is_query[:, None] & in_head[None, :], other=0.0)
    if IS_FP8:
        largest = tl.max(tl.abs(queries.to(tl.float32)), 1)
        power = tl.exp2(tl.ceil(tl.log2(tl.clamp(largest, 1e-30, 1e30))))
        scale_log2 *= power[:, None]
        queries = (queries.to(tl.float32) / power[:, None]).to(product_dtype)
        even_queries, odd_queries = tl.split(tl.reshape(queries, (QUERIES, BLOCK_ROW, 2)))
    length = tl.maximum(QUERY_LEN, tl.minimum(tl.load(seq_lens + row), table_width * BLOCK_SIZE))
    context = length  # what is read from the cache
    if IS_PROJECTION:
        context = length - QUERY_LEN
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(0, length - QUERY_LEN + 1 - window) // BLOCK_SIZE * BLOCK_SIZE
    split_len = tl.maximum(LEAST, tl.cdiv(tl.cdiv(context - first, SPLITS), TILE) * TILE)
    num_parts = tl.maximum(1, tl.cdiv(context - first, split_len))
    if split < num_parts:
        visible = length - QUERY_LEN + 1 + query_token  # a query token sees the context and itself
        highest = tl.full((QUERIES,), -1e30, tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        if HAS_SINKS:
            has_sink = is_query & (split == 0)
            highest = tl.load(sinks + query_head, mask=has_sink, other=-1e30) * _LOG2_E
            total = tl.where(has_sink, 1.0, 0.0)
        if IS_FP8:
            even = tl.zeros((QUERIES, BLOCK_VALUE_ROW), tl.float32)
            odd = tl.zeros((QUERIES, BLOCK_VALUE_ROW), tl.float32)
        else:
            weighted = tl.zeros((QUERIES, BLOCK_DV), tl.float32)
        begin = first + split * split_len
        for tile in range(begin, tl.minimum(begin + split_len, context), TILE):
            token = tile + token_in_tile
            # Past the length there may be anything, NaN included: its scores are replaced, and its values are not read.
            in_context = (token < context)[:, None]
            block = tl.load(table + tl.minimum(token // BLOCK_SIZE, table_width - 1)).to(tl.int64)
            token_row = (block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + token % BLOCK_SIZE
            key_place = (token_row * ROW)[:, None] + row_cell[None, :]
            value_place = (token_row * VALUE_ROW)[:, None] + value_cell[None, :]
            is_visible = token[None, :] < tl.minimum(visible, context)[:, None]
            if HAS_WINDOW:
                is_visible &= token[None, :] >= (visible - window)[:, None]
            if BLOCK_D == D:
                keys = tl.load(key_cache + key_place)
            else:
                keys = tl.load(key_cache + key_place, mask=in_row[None, :], other=0)
            if BLOCK_DV == DV:
                values = tl.load(value_cache + value_place, mask=in_context, other=0)
            else:
                values = tl.load(value_cache + value_place, mask=in_context & in_value_row[None, :], other=0)
            if IS_FP8:
                highest, total, even, odd = _attend_words(
                    even_queries,
                    odd_queries,
                    keys,
                    values,
                    is_visible,
                    scale_log2,
                    cap_log2,
                    highest,
                    total,
                    even,
                    odd,
                    HAS_CAP,
                    HALVES_ASM,
                )
            else:
                highest, total, weighted = attend(
                    queries, keys, values, is_visible, scale_log2, cap_log2, highest, total, weighted, HAS_CAP
                )
        if IS_PROJECTION:  # noqa: SIM102  (a constant, and a value that the device has)
            if split == num_parts - 1:  # the step's own keys and values: to the cache, and into the softmax
                fresh = tl.arange(0, FRESH)
                is_fresh = fresh < QUERY_LEN
                fresh_mask = is_fresh[:, None] & in_value[None, :]
                key = source + (first_token + fresh) * WIDTH + (NUM_HEADS + kv_head) * D
                key_angle = (first_token + fresh) * (D // 2)
                new_keys = _make_head(key, k_weight, eps, key_angle, cos, sin, is_fresh, D, BLOCK_D, HAS_NORM)
                value = source + (first_token + fresh) * WIDTH + FIRST_VALUE + kv_head * DV
                new_values = tl.load(value[:, None] + value_column[None, :], mask=fresh_mask, other=0.0)
                if HAS_VALUE_NORM:
                    wide = new_values.to(tl.float32)
                    new_values = (wide * tl.rsqrt(tl.sum(wide * wide, 1) / DV + eps)[:, None]).to(dtype)
                if IS_FP8:
                    new_keys = _words(narrowed(new_keys * k_inverse, tl.float8e4nv), FRESH, BLOCK_ROW)
                    new_values = narrowed(new_values.to(tl.float32) * v_inverse, tl.float8e4nv)
                    # Rows without a token are zero already. But of numbers that it knows, the assembler (ptxas 12.8)
                    # makes words with halves of other registers, NaN among them, and 0 times that is NaN.
                    new_values = tl.where(is_fresh[:, None], _words(new_values, FRESH, BLOCK_VALUE_ROW), 0)
                else:
                    new_keys = new_keys.to(dtype)
                slot = tl.load(slot_mapping + first_token + fresh, mask=is_fresh, other=0)
                slot_row = (slot // BLOCK_SIZE * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
                key_slot = slot_row[:, None] * ROW + row_cell[None, :]
                value_slot = slot_row[:, None] * VALUE_ROW + value_cell[None, :]
                tl.store(key_cache + key_slot, new_keys, mask=is_fresh[:, None] & in_row[None, :])
                tl.store(value_cache + value_slot, new_values, mask=is_fresh[:, None] & in_value_row[None, :])
                sees = (fresh[None, :] <= query_token[:, None]) & is_fresh[None, :]
                if HAS_WINDOW:
                    sees &= fresh[None, :] > (query_token - window)[:, None]
                if IS_FP8:
                    highest, total, even, odd = _attend_words(
                        even_queries,
                        odd_queries,
                        new_keys,
                        new_values,
                        sees,
                        scale_log2,
                        cap_log2,
                        highest,
                        total,
                        even,
                        odd,
                        HAS_CAP,
                        HALVES_ASM,
                    )
                else:
                    highest, total, weighted = attend(
                        queries, new_keys, new_values, sees, scale_log2, cap_log2, highest, total, weighted, HAS_CAP
                    )
        if IS_FP8:
            weighted = tl.interleave(even, odd) * v_scale
        if num_parts == 1:
            tl.store(out + out_cell, as_stored(weighted / total[:, None], out, CLAMPS), mask=out_mask)
        else:
            pair = row * (NUM_KV_HEADS * SHARES) + share
            parts = partial + (pair * SPLITS).to(tl.int64) * PART
            part = parts + split * PART
            tl.store(part + query[:, None] * BLOCK_DV + value_column[None, :], weighted, mask=is_query[:, None])
            tl.store(part + FILLED * BLOCK_DV + query, highest, mask=is_query)
            tl.store(part + FILLED * (BLOCK_DV + 1) + query, total, mask=is_query)
            if arrives_last(counters + pair, num_parts):
                # Several parts at a time: what is waited for is one load after another.
                element = tl.arange(0, FILLED * BLOCK_DV)
                of_query, of_column = element // BLOCK_DV, element % BLOCK_DV
                is_element = of_query < QUERY_LEN * GROUP
                most = tl.full((FILLED * BLOCK_DV,), -1e30, tl.float32)
                weight_sum = tl.zeros((FILLED * BLOCK_DV,), tl.float32)
                value_sum = tl.zeros((FILLED * BLOCK_DV,), tl.float32)
                for begin in range(0, num_parts, PARTS_AT_ONCE):
                    index = begin + tl.arange(0, PARTS_AT_ONCE)
                    mask = (index < num_parts)[:, None] & is_element[None, :]
                    address = parts + index[:, None] * PART
                    value = tl.load(address + element[None, :], mask=mask, other=0.0, cache_modifier=".cg")
                    address += FILLED * BLOCK_DV + of_query[None, :]
                    part_most = tl.load(address, mask=mask, other=-1e30, cache_modifier=".cg")
                    part_sum = tl.load(address + FILLED, mask=mask, other=0.0, cache_modifier=".cg")
                    new_most = tl.maximum(most, tl.max(part_most, 0))
                    shrink, grow = tl.exp2(most - new_most), tl.exp2(part_most - new_most[None, :])
                    weight_sum = weight_sum * shrink + tl.sum(part_sum * grow, 0)
                    value_sum = value_sum * shrink + tl.sum(value * grow, 0)
                    most = new_most
                token_head = (first_token + of_query // GROUP) * NUM_HEADS + share * GROUP
                sum_cell = (token_head + of_query % GROUP) * DV + of_column
                result = value_sum / tl.where(is_element, weight_sum, 1.0)
                tl.store(out + sum_cell, as_stored(result, out, CLAMPS), mask=is_element & (of_column < DV))

"""Paged attention against its plain twin: groups of decode rows, drafts, chunks, mixed steps, the null block."""

from __future__ import annotations

import itertools
import random

import pytest
import reference_ops as reference
import torch
from sizes import sized

from raypp.ops import row_attention
from raypp.ops.attention import AttentionBatch, Heads
from raypp.ops.cpu import paged_attention as attention_module
from raypp.ops.cpu.paged_attention import paged_attention
from raypp.ops.cuda.step_attention import SdpaPrefill
from raypp.ops.kv_cache import FP8, LayerCache, allocate_layer_cache, as_cached
from raypp.ops.row_attention import row_pieces

HEAD_DIM = 8


def copy_of(cache):
    return LayerCache(*(side.clone() for side in cache))


class Step:
    """Random queries, keys and values of a step, over a cache that holds random tokens already.

    Args:
        decode_lens: Each decode row's length, this step included.
        prefill: Each prefill row's (tokens of this step, length).
        kv_dtype: Of the cache; None: as the queries.
        settings: Of `Heads`. With a window the tables' entries before it name blocks without a number.
    """

    def __init__(
        self,
        decode_lens=(),
        prefill=(),
        *,
        query_len=1,
        num_heads=4,
        num_kv_heads=2,
        block_size=4,
        dtype=torch.float32,
        seed=0,
        kv_dtype=None,
        scales=(1.0, 1.0),
        head_dim=HEAD_DIM,
        has_sinks=False,
        **settings,
    ):
        generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
        sinks = torch.randn(num_heads, generator=generator) * 2 if has_sinks else None
        self.heads = heads = Heads(num_heads, num_kv_heads, head_dim, None, *scales, sinks=sinks, **settings)
        self.seq_lens = [*decode_lens, *(length for _, length in prefill)]
        self.query_lens = [query_len] * len(decode_lens) + [count for count, _ in prefill]
        width = -(-max(self.seq_lens) // block_size)
        blocks = list(range(1, 1 + width * len(self.seq_lens)))
        rng.shuffle(blocks)
        self.tables = torch.tensor(blocks, dtype=torch.int32).view(len(self.seq_lens), width)
        kv_dtype, cpu = kv_dtype or dtype, torch.device("cpu")
        sizes = (num_kv_heads, head_dim, heads.value_dim)
        stale = 1 + len(blocks)
        self.cache = allocate_layer_cache(stale + 1, block_size, *sizes, kv_dtype, cpu)
        for side in self.cache:
            side.copy_(torch.randn(side.shape, generator=generator))
        num_tokens = sum(self.query_lens)
        self.q = torch.randn(num_tokens, num_heads, head_dim, generator=generator).to(dtype)
        self.k, self.v = (torch.randn(num_tokens, num_kv_heads, n, generator=generator).to(dtype) for n in sizes[1:])
        slots = [
            int(self.tables[row, position // block_size]) * block_size + position % block_size
            for row, (count, length) in enumerate(zip(self.query_lens, self.seq_lens, strict=True))
            for position in range(length - count, length)
        ]
        if heads.window is not None:
            for table, count, length in zip(self.tables, self.query_lens, self.seq_lens, strict=True):
                table[: max(0, length - count + 1 - heads.window) // block_size] = stale
            for side in self.cache:
                side[stale] = torch.nan
        self.batch = AttentionBatch(
            num_decode_rows=len(decode_lens),
            decode_query_len=query_len,
            seq_lens=torch.tensor(self.seq_lens, dtype=torch.int32),
            block_tables=[self.tables],
            slot_mappings=[torch.tensor(slots)],
            prefill_query_lens=[count for count, _ in prefill],
            prefill_seq_lens=[length for _, length in prefill],
        )

    @property
    def plan(self):
        return self.batch.plans[self.heads.kind]

    def check(self, tolerance=2e-6):
        expected_cache = copy_of(self.cache)
        expected = reference.paged_attention(
            self.q, self.k, self.v, expected_cache, self.query_lens, self.seq_lens, self.tables, self.heads
        )
        got = paged_attention(self.q, self.k, self.v, self.cache, self.batch, self.heads)
        for side, expected_side in zip(self.cache, expected_cache, strict=True):
            assert torch.equal(side, expected_side)
        assert got.dtype == self.q.dtype
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (4, 2), (8, 2), (4, 1)])
@pytest.mark.parametrize("query_len", [1, 2, 4])
def test_decode(num_heads, num_kv_heads, query_len):
    Step((9, 30, 4, 17), query_len=query_len, num_heads=num_heads, num_kv_heads=num_kv_heads).check()


def test_one_row():
    for length in (1, 2, 3, 4, 5, 33):
        Step((length,)).check()


@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("group_bytes", [1, 2000, 6000])
def test_decode_in_groups(monkeypatch, query_len, group_bytes):
    monkeypatch.setattr(attention_module, "GROUP_BYTES", group_bytes)
    step = Step((9, 30, 4, 17, 30, 3, 8, 12), ((5, 11),), query_len=query_len)
    step.check()
    assert len(step.plan.decode_groups) > 1


def test_groups_hold_rows_of_similar_length(monkeypatch):
    monkeypatch.setattr(attention_module, "GROUP_BYTES", 4096)
    step = Step((90, 3, 5, 88, 4, 91, 6))
    step.check()
    members = [sorted(group.tokens.tolist()) for group in step.plan.decode_groups]
    assert members == [[1, 2, 4, 6], [3], [0], [5]]


@pytest.mark.parametrize("prefill", [[(6, 6)], [(5, 12)], [(1, 1)], [(1, 9)], [(6, 6), (3, 20), (9, 9)]])
def test_prefill(prefill):
    for num_heads, num_kv_heads in ((2, 2), (4, 1)):
        Step((), prefill, num_heads=num_heads, num_kv_heads=num_kv_heads).check()


@pytest.mark.parametrize("query_len", [1, 3])
def test_mixed_step(query_len):
    for seed in range(5):
        rng = random.Random(seed)
        decode = [rng.randint(query_len, 40) for _ in range(rng.randint(1, 5))]
        prefill = [(count, count + rng.choice((0, 13))) for count in (rng.randint(1, 9), rng.randint(1, 9))]
        Step(decode, prefill, query_len=query_len, block_size=rng.choice((1, 3, 16)), seed=seed).check()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_half_precision(dtype, tolerance):
    Step((9, 17), ((5, 5), (4, 11)), dtype=dtype).check(tolerance)


def test_layers_share_one_plan():
    step = Step((9, 17), ((5, 11),))
    step.check()
    plan = step.plan
    step.check()
    assert step.plan is plan


def _poison(step):
    """Fill what belongs to no row: behind each row's length, and the null block, in which every table ends."""
    block_size = step.cache.keys.shape[2]
    step.tables = torch.cat((step.tables, torch.zeros(len(step.seq_lens), 1, dtype=torch.int32)), 1)
    step.batch.block_tables = [step.tables]
    bad = itertools.cycle((torch.nan, torch.inf, -torch.inf))
    for side in step.cache:
        side[0] = torch.nan
    for table, length in zip(step.tables.tolist(), step.seq_lens, strict=True):
        for position in range(length, (len(table) - 1) * block_size):
            for side in step.cache:
                side[table[position // block_size], :, position % block_size] = next(bad)


@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("group_bytes", [1, 2000, 2 << 20])
def test_what_lies_behind_a_rows_length_reaches_nobody(monkeypatch, query_len, group_bytes):
    monkeypatch.setattr(attention_module, "GROUP_BYTES", group_bytes)
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 2e-2)):
        step = Step((9, 30, 4, 17), ((5, 11), (6, 6)), query_len=query_len, dtype=dtype)
        plain = Step((9, 30, 4, 17), ((5, 11), (6, 6)), query_len=query_len, dtype=dtype)
        _poison(step)
        got = paged_attention(step.q, step.k, step.v, step.cache, step.batch, step.heads)
        assert got.isfinite().all()
        expected = paged_attention(plain.q, plain.k, plain.v, plain.cache, plain.batch, plain.heads)
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


def test_nor_in_a_prefill_of_plain_torch():
    step = Step((), ((5, 11), (6, 6), (1, 30)))
    _poison(step)
    expected = reference.paged_attention(
        step.q, step.k, step.v, step.cache, step.query_lens, step.seq_lens, step.tables, step.heads
    )
    prefill, got = SdpaPrefill(step.heads, 4, step.q.dtype), torch.empty_like(step.q)
    prefill.run(prefill.plan(step.batch, 0), step.q, step.cache, step.heads, got)
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=2e-6)


def test_a_row_past_its_table_hurts_nobody():
    """Its tokens go to the null block; what it attends to stops at the table's end; its neighbours do not notice."""
    step = Step((8, 8), block_size=4)
    expected = reference.paged_attention(
        step.q, step.k, step.v, copy_of(step.cache), step.query_lens, step.seq_lens, step.tables, step.heads
    )
    step.batch.seq_lens[1] = 11
    step.batch.slot_mappings[0][1] = 0
    got = paged_attention(step.q, step.k, step.v, step.cache, step.batch, step.heads)
    torch.testing.assert_close(got[0], expected[0], atol=2e-6, rtol=2e-6)
    assert got.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.05, 3.0)])
@pytest.mark.parametrize("prefill", [(), ((5, 5), (4, 11)), ((1, 9),)])
def test_a_cache_in_8_bits(dtype, scales, prefill):
    """A step's own tokens, too, are attended to as the cache holds them; what is beyond its range is cut."""
    step = Step((9, 17), prefill, query_len=2, dtype=dtype, kv_dtype=FP8, scales=scales)
    step.k[0], step.v[0] = 1e5, -1e5

    def as_read(x, scale):
        return as_cached(x, step.cache.keys, scale).float() * scale

    exact = LayerCache(*(side.float() * scale for side, scale in zip(step.cache, scales, strict=True)))
    expected = reference.paged_attention(
        step.q.float(),
        as_read(step.k, scales[0]),
        as_read(step.v, scales[1]),
        exact,
        step.query_lens,
        step.seq_lens,
        step.tables,
        step.heads,
    )
    got = paged_attention(step.q, step.k, step.v, step.cache, step.batch, step.heads)
    assert got.dtype == dtype
    for side, expected_side, scale in zip(step.cache, exact, scales, strict=True):
        torch.testing.assert_close(side.float() * scale, expected_side, atol=0, rtol=1e-6)
    assert max(float(side.float().abs().max()) for side in step.cache) == 448.0
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.float(), expected, atol=tolerance * 448 * scales[1], rtol=tolerance)
    torch.testing.assert_close(got[4:].float(), expected[4:], atol=4 * tolerance, rtol=4 * tolerance)


def naive_attention(step):
    """Return what each query token of a step attends to, head by head and position by position, [T, Hq, Dv]."""
    heads, block_size, outputs = step.heads, step.cache.keys.shape[2], []
    group = heads.num_heads // heads.num_kv_heads
    token = 0
    for table, count, length in zip(step.tables.tolist(), step.query_lens, step.seq_lens, strict=True):
        for position in range(length - count, length):
            first = 0 if heads.window is None else max(0, position - heads.window + 1)
            places = [(table[p // block_size], p % block_size) for p in range(first, position + 1)]
            of_heads = []
            for head in range(heads.num_heads):
                keys, values = (
                    torch.stack([side[block, head // group, place] for block, place in places]).float()
                    for side in step.cache
                )
                scores = keys @ step.q[token, head].float() * heads.scale
                if heads.soft_cap is not None:
                    scores = heads.soft_cap * torch.tanh(scores / heads.soft_cap)
                weights = scores.exp()
                total = weights.sum() + (0 if heads.sinks is None else heads.sinks[head].exp())
                of_heads.append((weights / total) @ values)
            outputs.append(torch.stack(of_heads))
            token += 1
    return torch.stack(outputs)


def check_naively(step, tolerance=5e-6):
    """Compare with the naive way, and plain torch's prefill with it too where there are only prompts."""
    got = paged_attention(step.q, step.k, step.v, step.cache, step.batch, step.heads)  # and writes the cache
    expected = naive_attention(step)
    assert got.dtype == step.q.dtype
    torch.testing.assert_close(got.float(), expected, atol=tolerance, rtol=tolerance)
    if not step.batch.num_decode_rows:
        prefill = SdpaPrefill(step.heads, step.cache.keys.shape[2], step.q.dtype)
        by_prefill = torch.full_like(got, torch.nan)
        prefill.run(prefill.plan(step.batch, 0), step.q, step.cache, step.heads, by_prefill)
        torch.testing.assert_close(by_prefill.float(), expected, atol=tolerance, rtol=tolerance)


KINDS = [
    {"window": 1},
    {"window": 3, "has_sinks": True},
    {"window": 7, "soft_cap": 2.0},
    {"window": 1000, "has_sinks": True, "soft_cap": 1.0},
    {"has_sinks": True},
    {"soft_cap": 3.0, "scale": 0.9},
    {"v_dim": 4, "window": 5},
    {"v_dim": 24, "has_sinks": True, "soft_cap": 4.0},
    {"head_dim": 12, "v_dim": 8, "scale": 0.1},
    {"window": 6, "num_heads": 32, "has_sinks": True},  # 16 query heads per KV head
    {"window": 4, "num_heads": 4, "num_kv_heads": 1, "v_dim": 16},
]


@pytest.mark.parametrize("settings", KINDS, ids=str)
@pytest.mark.parametrize("query_len", [1, 4])
def test_decode_of_all_kinds(monkeypatch, query_len, settings):
    """Windows are shorter than drafts, and no multiples of the block size; one row has no token but its own."""
    for group_bytes in (1, 3000, 2 << 20):
        monkeypatch.setattr(attention_module, "GROUP_BYTES", group_bytes)
        check_naively(Step((9, 30, query_len, 17, 5, 32), query_len=query_len, **settings))


@pytest.mark.parametrize("settings", KINDS, ids=str)
@pytest.mark.parametrize("prefill", [[(6, 6)], [(5, 12)], [(1, 1), (1, 9)], [(16, 16), (3, 20), (9, 9)]])
def test_prefill_of_all_kinds(monkeypatch, prefill, settings):
    monkeypatch.setattr(row_attention, "_LEAST_PIECE", 2)  # chunks are cut, as long ones are
    monkeypatch.setattr(row_attention, "_SCORES_BYTES", 500)
    check_naively(Step((), prefill, **settings))


@pytest.mark.parametrize("seed", range(sized(15, 200)))
def test_random_steps_of_all_kinds(monkeypatch, seed):
    rng = random.Random(seed)
    monkeypatch.setattr(row_attention, "_LEAST_PIECE", rng.choice((1, 5, 128)))
    monkeypatch.setattr(attention_module, "GROUP_BYTES", rng.choice((1, 4000, 2 << 20)))
    query_len = rng.randint(1, 6)
    num_kv_heads = rng.choice((1, 2))
    settings = {
        "num_kv_heads": num_kv_heads,
        "num_heads": num_kv_heads * rng.choice((1, 2, 3, 16)),
        "head_dim": rng.choice((4, 8)),
        "v_dim": rng.choice((None, 6)),
        "window": rng.choice((None, 1, 2, 5, 11, 40)),
        "soft_cap": rng.choice((None, 2.0)),
        "has_sinks": rng.random() < 0.5,
        "block_size": rng.choice((1, 3, 4, 16)),
    }
    decode = [rng.randint(query_len, 50) for _ in range(rng.randint(0, 4))]
    prefill = [(count, count + rng.choice((0, 1, 25))) for count in (rng.randint(1, 30) for _ in range(2))]
    check_naively(Step(decode, prefill, query_len=query_len, seed=seed, **settings))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float16, 3e-3)])
@pytest.mark.parametrize("settings", [{"window": 5, "has_sinks": True}, {"soft_cap": 2.0, "v_dim": 12}], ids=str)
def test_kinds_in_half_precision(dtype, tolerance, settings):
    check_naively(Step((9, 17), ((5, 5), (4, 11)), query_len=2, dtype=dtype, **settings), tolerance)


def test_heads_as_large_as_there_are():
    check_naively(Step((9, 40), ((5, 5), (4, 11)), head_dim=512, window=6))
    check_naively(Step((9, 40), ((4, 11),), head_dim=192, v_dim=128))


@pytest.mark.parametrize("settings", [{"window": 6, "has_sinks": True}, {"v_dim": 12, "soft_cap": 3.0}], ids=str)
def test_kinds_over_a_cache_in_8_bits(settings):
    """As over one that holds what is read of it."""
    step = Step((9, 17), ((5, 5), (4, 11)), query_len=2, kv_dtype=FP8, scales=(0.5, 2.0), **settings)
    got = paged_attention(step.q, step.k, step.v, step.cache, step.batch, step.heads)
    step.cache = LayerCache(step.cache.keys.float() * 0.5, step.cache.values.float() * 2.0)
    torch.testing.assert_close(got, naive_attention(step), atol=5e-6, rtol=5e-6)


def test_a_window_reads_no_more_than_it_shows():
    step = Step((400, 33), block_size=4, window=10)
    check_naively(step)
    (group,) = step.plan.decode_groups
    assert group.length == 16  # four blocks hold ten tokens wherever these begin
    long = Step((), ((300, 300), (200, 900)), block_size=4, window=10)
    check_naively(long)
    assert max(piece.num_keys for piece in long.plan.prefill_pieces) < 128 + 10 + 4


@pytest.mark.parametrize("window", [None, 6])
def test_a_windowed_row_past_its_table_hurts_nobody(window):
    step = Step((8, 8), block_size=4, window=window)
    step.batch.seq_lens[1] = 11
    step.batch.slot_mappings[0][1] = 0
    got = paged_attention(step.q, step.k, step.v, step.cache, step.batch, step.heads)
    assert got.isfinite().all()
    step.query_lens, step.seq_lens, step.tables, step.q = [1], [8], step.tables[:1], step.q[:1]
    torch.testing.assert_close(got[:1], naive_attention(step), atol=5e-6, rtol=5e-6)


def test_kinds_have_plans_and_groups_have_blocks_of_their_own():
    """Two layers of one step: other heads, another window, other tables."""
    full, windowed = Step((9, 30), ((5, 11),)), Step((9, 30), ((5, 11),), window=4, num_heads=6, seed=3, group=1)
    full.batch.block_tables = [full.tables, windowed.tables]
    full.batch.slot_mappings = [full.batch.slot_mappings[0], windowed.batch.slot_mappings[0]]
    windowed.batch = full.batch
    check_naively(full)
    check_naively(windowed)
    assert len(full.batch.plans) == 2
    assert full.plan is not windowed.plan


@pytest.mark.parametrize("num_before", [0, 30_000])
def test_pieces_of_windows_are_no_smaller_for_a_long_text_before(num_before):
    """Of a row with an image, whose scores torch may compute all at once: at most 32 MiB of them."""
    heads = Heads(32, 16, 128, window=1024)
    pieces = list(row_pieces(2048, num_before + 2048, heads, 16, [(300, 556)]))
    assert [piece.begin for piece in pieces[1:]] == [piece.end for piece in pieces[:-1]]
    assert all((piece.end - piece.begin) * 32 * 4 * 2048 <= 32 << 20 for piece in pieces)
    assert len(pieces) < 24

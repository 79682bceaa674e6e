"""Paged attention against its plain twin: groups of decode rows, drafts, chunks, mixed steps, the null block."""

from __future__ import annotations

import itertools
import random

import pytest
import reference_ops as reference
import torch

from raypp.ops.attention import AttentionBatch, Heads
from raypp.ops.cpu import paged_attention as attention_module
from raypp.ops.cpu.paged_attention import paged_attention
from raypp.ops.cuda.step_attention import SdpaPrefill
from raypp.ops.kv_cache import FP8, LayerCache, allocate_layer_cache, as_cached

HEAD_DIM = 8
SCALE = HEAD_DIM**-0.5


def copy_of(cache):
    return LayerCache(*(side.clone() for side in cache))


class Step:
    """Random queries, keys and values of a step, over a cache that holds random tokens already.

    Args:
        decode_lens: Each decode row's length, this step included.
        prefill: Each prefill row's (tokens of this step, length).
        kv_dtype: Of the cache; None: as the queries.
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
    ):
        generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
        self.heads = Heads(num_heads, num_kv_heads, HEAD_DIM, None, *scales)
        self.seq_lens = [*decode_lens, *(length for _, length in prefill)]
        self.query_lens = [query_len] * len(decode_lens) + [count for count, _ in prefill]
        width = -(-max(self.seq_lens) // block_size)
        blocks = list(range(1, 1 + width * len(self.seq_lens)))
        rng.shuffle(blocks)
        self.tables = torch.tensor(blocks, dtype=torch.int32).view(len(self.seq_lens), width)
        kv_dtype, cpu = kv_dtype or dtype, torch.device("cpu")
        sizes = (num_kv_heads, HEAD_DIM, HEAD_DIM)
        self.cache = allocate_layer_cache(1 + len(blocks), block_size, *sizes, kv_dtype, cpu)
        for side in self.cache:
            side.copy_(torch.randn(side.shape, generator=generator))
        num_tokens = sum(self.query_lens)
        self.q = torch.randn(num_tokens, num_heads, HEAD_DIM, generator=generator).to(dtype)
        self.k, self.v = torch.randn(2, num_tokens, num_kv_heads, HEAD_DIM, generator=generator).to(dtype)
        slots = [
            int(self.tables[row, position // block_size]) * block_size + position % block_size
            for row, (count, length) in enumerate(zip(self.query_lens, self.seq_lens, strict=True))
            for position in range(length - count, length)
        ]
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
            self.q, self.k, self.v, expected_cache, self.query_lens, self.seq_lens, self.tables, SCALE
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
        step.q, step.k, step.v, step.cache, step.query_lens, step.seq_lens, step.tables, SCALE
    )
    prefill, got = SdpaPrefill(4), torch.empty_like(step.q)
    prefill.run(prefill.plan(step.batch, 0), step.q, step.cache, step.heads, got)
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=2e-6)


def test_a_row_past_its_table_hurts_nobody():
    """Its tokens go to the null block; what it attends to stops at the table's end; its neighbours do not notice."""
    step = Step((8, 8), block_size=4)
    expected = reference.paged_attention(
        step.q, step.k, step.v, copy_of(step.cache), step.query_lens, step.seq_lens, step.tables, SCALE
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
        SCALE,
    )
    got = paged_attention(step.q, step.k, step.v, step.cache, step.batch, step.heads)
    assert got.dtype == dtype
    for side, expected_side, scale in zip(step.cache, exact, scales, strict=True):
        torch.testing.assert_close(side.float() * scale, expected_side, atol=0, rtol=1e-6)
    assert max(float(side.float().abs().max()) for side in step.cache) == 448.0
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.float(), expected, atol=tolerance * 448 * scales[1], rtol=tolerance)
    torch.testing.assert_close(got[4:].float(), expected[4:], atol=4 * tolerance, rtol=4 * tolerance)

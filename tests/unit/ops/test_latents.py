"""Attention over latents in Triton's interpreter, against its twin."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from latent_checks import check_latents

from raypp.ops.cuda import step_attention
from raypp.ops.cuda.latent_kernels import LatentTuning, tune_latents
from raypp.ops.expanded_rows import MOST_GROUPS, LatentSizes, group_rows

EXACT = torch.float32
ODD = (5, 7, 6, 20, 9)
"""No size is a power of two."""


@pytest.mark.parametrize(
    ("sizes", "lens", "query_len", "more"),
    [
        (ODD, [33, 1, 70, 16], 1, {"block_size": 8, "has_neighbours": False}),
        (ODD, [40, 3, 0, 17], 3, {"block_size": 4, "in_columns": True}),
        ((40, 8, 8, 32, 16), [150, 129, 0], 2, {"tuning": LatentTuning(3, 3, 16)}),  # 14 heads by program
        ((3, 16, 4, 33, 12), [300], 1, {"tuning": LatentTuning(64, 1, 16)}),  # more splits than the row has
        (ODD, [33, 40, 1], 1, {"scale": 0.5}),
        (ODD, [33, 40], 4, {"scale": 2.0, "has_neighbours": False}),
    ],
)
def test_decode_rows(sizes, lens, query_len, more):
    check_latents(EXACT, sizes, lens, query_len, **more)


@pytest.mark.parametrize("scale", [None, 0.5])
def test_prefill_rows_beside_decode_rows(scale, monkeypatch):
    monkeypatch.setattr(step_attention, "_on_host", lambda values: torch.tensor(values, dtype=torch.int32))
    check_latents(EXACT, ODD, [33, 5], 1, [(7, 30), (20, 20), (1, 12)], block_size=8, scale=scale)
    monkeypatch.setattr("raypp.ops.expanded_rows.EXPANDED_BYTES", 3000)  # one head after the other
    check_latents(EXACT, ODD, [], 1, [(7, 30), (5, 5)], block_size=8, scale=scale)


@pytest.mark.parametrize("num_heads", [16, 20, 64, 128])
def test_every_cut_fits(num_heads):
    device = SimpleNamespace(num_processors=132, shared_bytes=227 << 10)
    for query_len in (1, 2, 5, 17):
        for num_rows in range(1, 520):
            tuning = tune_latents(num_rows, num_heads, query_len, device)
            heads = -(-num_heads // tuning.num_shares)
            assert heads * query_len <= 64
            assert heads * tuning.num_shares >= num_heads
            if tuning.num_splits > 1:
                assert num_rows * tuning.num_shares * tuning.num_splits <= 2 * 132


def test_groups_stay_within_what_is_planned():
    sizes = LatentSizes(1152, 640)
    for lens in ([8192] * 64, [163_840], [3000, 1, 70], [200_000, 5, 90_000], [6000] * 8):
        groups = group_rows(lens, sizes, 128)
        assert [length for rows in groups.rows for length in lens[rows]] == lens
        most = max(sum(lens[rows]) for rows in groups.rows) * sizes.of_token(groups.num_heads)
        assert most <= sizes.planned(max(lens))
        assert len(groups.rows) <= MOST_GROUPS or groups.num_heads == 1

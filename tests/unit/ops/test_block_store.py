"""KV blocks in CPU memory hold what the caches held."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from raypp.ops.block_store import BlockStore, TorchBlockMover, TorchBlockStore
from raypp.ops.cuda import pinned_blocks
from raypp.ops.cuda.pinned_blocks import PinnedBlockStore, runs
from raypp.ops.device_kernels import open_row_store
from raypp.ops.kv_cache import FP8, LayerCache, allocate_layer_cache, sides

CPU = torch.device("cpu")
NUM_BLOCKS, NUM_CPU_BLOCKS = 12, 20


def make_caches(dtype: torch.dtype, block_size: int = 3) -> list[LayerCache]:
    """Of layers whose keys and values have other sizes than those of the next layer, and than each other."""
    sizes = ((3, 5, 5), (3, 5, 7), (2, 4, 4))
    caches = [allocate_layer_cache(NUM_BLOCKS, block_size, *each, dtype, CPU) for each in sizes]
    for side in as_bytes(caches):
        side.copy_(torch.randint(0, 255, side.shape, dtype=torch.uint8))
    return caches


def as_bytes(caches: list[LayerCache]) -> list[torch.Tensor]:
    return [side.view(torch.uint8) for side in sides(caches)]


@pytest.fixture(params=["torch", "pinned", "pinned, one by one"])
def make_store(request, monkeypatch):
    """Of both devices; that of a GPU on caches of the CPU."""
    monkeypatch.setattr(
        pinned_blocks, "locked_memory", lambda num_bytes, owner: torch.zeros(num_bytes, dtype=torch.uint8)
    )

    def make(caches: list[LayerCache]) -> BlockStore:
        if request.param == "torch":
            return TorchBlockStore(caches, NUM_CPU_BLOCKS)
        return PinnedBlockStore(caches, NUM_CPU_BLOCKS, 4 if request.param == "pinned" else 1, TorchBlockMover())

    return make


@pytest.mark.parametrize("block_size", [1, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
def test_blocks_come_back_wherever_they_go(make_store, dtype, block_size):
    caches = make_caches(dtype, block_size)
    before = [side.clone() for side in as_bytes(caches)]
    store = make_store(caches)
    rng = np.random.default_rng(0)
    blocks = rng.permutation(np.arange(1, NUM_BLOCKS))[:7].astype(np.int32)
    places = rng.permutation(NUM_CPU_BLOCKS)[:7].astype(np.int32)
    store.copy_out(blocks, places)
    for side, then in zip(as_bytes(caches), before, strict=True):
        assert torch.equal(side, then)
        side.zero_()
    others = rng.permutation(np.arange(1, NUM_BLOCKS))[:5].astype(np.int32)
    store.copy_in(others, places[2:])
    untouched = sorted(set(range(NUM_BLOCKS)) - set(others.tolist()))
    for now, then in zip(as_bytes(caches), before, strict=True):
        for block, other in zip(blocks[2:].tolist(), others.tolist(), strict=True):
            assert torch.equal(now[other], then[block])
        assert not now[untouched].any()


def test_rows_of_tensors_come_back_wherever_they_go():
    tables = [
        torch.arange(9, dtype=torch.int32),
        torch.randn(9, 3, 5),
        torch.randn(9, 7).to(torch.bfloat16),
        torch.randn(9, 2, 2, 2, dtype=torch.float64),
    ]
    snapshots = [table[3:] for table in tables]  # behind rows of requests
    before = [table.clone() for table in tables]
    store = open_row_store(snapshots, 4)
    store.copy_out(np.array([0, 5, 2], np.int32), np.array([3, 1, 0], np.int32))
    for table in tables:
        table.zero_()
    store.copy_in(np.array([4, 0, 1], np.int32), np.array([1, 0, 1], np.int32))
    for table, then in zip(tables, before, strict=True):
        assert torch.equal(table[[7, 3, 4]], then[[8, 5, 8]])
        assert not table[[0, 1, 2, 5, 6, 8]].any()


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([3], [(0, 1)]),
        ([3, 4, 5], [(0, 3)]),
        ([0, 2, 3, 7], [(0, 1), (1, 3), (3, 4)]),
    ],
)
def test_neighbours_are_copied_together(places, expected):
    assert list(runs(np.array(places))) == expected

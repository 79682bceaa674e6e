"""Sums of slices over members, one after the other in Triton's interpreter: what the others push is there."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "micro"))
import large_sums
from large_sums import SlicedSums

from raypp.ops.cuda.kernel_launch import Device

PLACE, NUM_PROGRAMS, BLOCK = 4096, 4, 64
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(("rows", "hidden"), [(1, 8), (4, 130), (16, 128)])
@pytest.mark.parametrize("count", [2, 3])
def test_each_member_sums_its_slice_and_takes_the_others(count: int, rows: int, hidden: int) -> None:
    parts = [torch.randn(rows, hidden, device=DEVICE).half() for _ in range(count)]
    residual = torch.randn(rows, hidden, device=DEVICE).half()
    total = torch.zeros(rows, hidden, device=DEVICE)
    for part in parts:
        total += part.float()
    expected = (total + residual.float()).half()
    slice_words = -(-expected.nbytes // (4 * count * BLOCK)) * BLOCK

    def words(x: torch.Tensor, rank: int) -> torch.Tensor:
        return x.view(torch.int32).flatten()[rank * slice_words : (rank + 1) * slice_words]

    for rank in range(count):
        memories = [
            torch.zeros(large_sums._FLAG_WORDS + 4 * count * PLACE, dtype=torch.int32, device=DEVICE)
            for _ in range(count)
        ]
        flags = [each[: 2 * count * NUM_PROGRAMS].view(2, count, NUM_PROGRAMS) for each in memories]
        data = [each[large_sums._FLAG_WORDS :].view(2, 2, count, PLACE) for each in memories]
        flags[rank].fill_(1)
        others = [other for other in range(count) if other != rank]
        for other in others:  # half 1 is that of the first sum
            for step, from_other in enumerate((words(parts[other], rank), words(expected, other))):
                data[rank][step, 1, other, : len(from_other)] = from_other
        memory = SimpleNamespace(
            addresses=torch.tensor([each.data_ptr() for each in memories], device=DEVICE),
            stop=torch.zeros(1, dtype=torch.int32, device=DEVICE),
        )
        sums = SlicedSums(memory, rank, count, Device.of(DEVICE), NUM_PROGRAMS, BLOCK, PLACE)
        x = parts[rank].clone()
        assert sums(x, residual) is x
        assert torch.equal(x, expected)
        for other in others:
            for step, pushed in enumerate((words(parts[rank], other), words(expected, rank))):
                assert torch.equal(data[other][step, 1, rank, : len(pushed)], pushed)
            assert bool((flags[other][:, rank] == 1).all())

"""Sums over members in shared memory: in Triton's interpreter where there is no GPU, one member after the other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from raypp.ops.cuda import member_sums
from raypp.ops.cuda.kernel_launch import Device
from raypp.ops.cuda.member_sums import PushedSums

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MAX_BYTES = 1 << 12
NUM_PROGRAMS = 4


class Member:
    """One of several in this process: its memory, and what it sums otherwise."""

    max_bytes = MAX_BYTES
    is_alone = False

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count, self.memory = rank, count, self
        self.packets = torch.zeros(2, count, MAX_BYTES // 4, dtype=torch.int64, device=DEVICE)
        self.counts = torch.zeros(NUM_PROGRAMS, dtype=torch.int32, device=DEVICE)
        self.stop = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        self.addresses = torch.zeros(count, dtype=torch.int64, device=DEVICE)
        self.summed_elsewhere: list[int] = []
        self.gathered_elsewhere: list[int] = []

    def sum_(self, x: torch.Tensor) -> torch.Tensor:
        self.summed_elsewhere.append(len(x))
        return x

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        self.gathered_elsewhere.append(len(x))
        return torch.stack([x] * self.count)


def members(count: int) -> list[Any]:
    made = [Member(rank, count) for rank in range(count)]
    for each in made:
        each.addresses.copy_(torch.tensor([other.packets.data_ptr() for other in made]))
    return made


def arrive(target: Member, rank: int, x: torch.Tensor, number: int) -> None:
    """Put there what a member's kernel would."""
    words = x.flatten().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    target.packets[number & 1, rank, : len(words)] = (number << 32) | words


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("count", [2, 3])
def test_sums_in_the_order_of_ranks(count, dtype):
    made, device = members(count), Device.of(DEVICE)
    cuts = device.is_interpreter and dtype == torch.bfloat16  # the interpreter rounds to zero
    sums = [PushedSums(each, device) for each in made]
    shapes = [(1, 2), (1, 8), (3, 128), (16, 128), (7, 66), (2, 2)]
    if dtype == torch.float32:
        shapes = [(1, 1), (1, 2), (9, 2), (3, 128)]
    for number, shape in enumerate(shapes, 1):
        parts = [torch.randn(shape, device=DEVICE).to(dtype) for _ in range(count)]
        residual = torch.randn(shape, device=DEVICE).to(dtype)
        total = torch.zeros(shape, device=DEVICE)
        for part in parts:
            total += part.float()
        expected = (total + residual.float()).to(dtype)
        for each in made:  # a kernel that waited for a later one would never end
            for rank in range(each.rank + 1, count):
                arrive(each, rank, parts[rank], number)
            x = parts[each.rank].clone()
            assert sums[each.rank](x, residual) is x
            torch.testing.assert_close(x, expected, rtol=2**-7 if cuts else 0, atol=0)
            assert each.counts.tolist() == [number] * NUM_PROGRAMS
    assert not any(each.summed_elsewhere for each in made)


def test_large_sums_in_pieces_where_bits_must_not_depend_on_rows():
    made, device = members(2), Device.of(DEVICE, is_invariant=True)
    own, other, residual = torch.randn(3, 29, 128, device=DEVICE).half()  # 16 rows fit
    expected = (own.float() + other.float() + residual.float()).half()
    for number, piece in enumerate(other.split(16), 1):
        arrive(made[0], 1, piece, number)
    assert PushedSums(made[0], device)(own, residual) is own
    assert torch.equal(own, expected)
    assert made[0].counts.tolist() == [2] * NUM_PROGRAMS
    assert not made[0].summed_elsewhere


def test_one_kernel_serves_sums_and_draws(monkeypatch):
    """What is compiled at start is what graphs capture, whether bits may depend on other rows or not."""
    made, launched = members(2), []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *_, **options: launched.append(options)

    monkeypatch.setattr(member_sums, "_push_and_sum", Kernel())
    x = torch.zeros(1, 16, dtype=torch.float16, device=DEVICE)
    for is_invariant in (False, True):
        sums = PushedSums(made[0], replace(Device.of(DEVICE), is_invariant=is_invariant, is_interpreter=False))
        sums(x, x)
        sums.gathered(x.int())
    assert launched[:2] == launched[2:]


@pytest.mark.parametrize("count", [2, 3])
def test_parts_of_all_come_by_rank(count):
    made, device = members(count), Device.of(DEVICE)
    sums = [PushedSums(each, device) for each in made]
    for number, shape in enumerate([(16,), (8, 2), (4, 128), (2, 16), (1024,)], 1):
        parts = [torch.randint(-(2**31), 2**31, shape, device=DEVICE).to(torch.int32) for _ in range(count)]
        for each in made:
            for rank in range(each.rank + 1, count):
                arrive(each, rank, parts[rank], number)
            assert torch.equal(sums[each.rank].gathered(parts[each.rank]), torch.stack(parts))
            assert each.counts.tolist() == [number] * NUM_PROGRAMS
    assert not any(each.gathered_elsewhere for each in made)
    for x in (torch.ones(1040, dtype=torch.int32), torch.ones(3)):  # too large, and of no multiple of 16
        assert torch.equal(sums[0].gathered(x), torch.stack([x] * count))
    assert made[0].gathered_elsewhere == [1040, 3]


def test_a_stop_ends_waits():
    made = members(2)
    made[0].stop.fill_(1)
    sums = PushedSums(made[0], Device.of(DEVICE))
    for _ in range(3):
        sums(*torch.ones(2, 1, 2, dtype=torch.bfloat16, device=DEVICE))
    assert made[0].counts.tolist() == [3] * NUM_PROGRAMS


def test_what_does_not_fit_goes_another_way():
    member = members(2)[0]
    sums = PushedSums(member, Device.of(DEVICE))
    for x in (torch.ones(33, 64, dtype=torch.bfloat16), torch.ones(9, 64), torch.ones(5, 3).bfloat16()):
        assert torch.equal(sums(x.clone(), x), 2 * x)
    x = torch.ones(7, 64, dtype=torch.bfloat16)
    member.is_alone = True  # while a stage is built
    assert torch.equal(sums(x.clone(), x), 2 * x)
    member.memory, member.is_alone = None, False  # GPUs that do not reach each other
    assert torch.equal(sums(x.clone(), x), 2 * x)
    assert member.summed_elsewhere == [33, 9, 5, 7, 7]
    assert not member.counts.any()
    assert len(PushedSums(member, Device.of(DEVICE))(x[:0], x[:0])) == 0

"""Sums of many rows over the members of a stage, in two steps: a candidate beside NCCL; two GPUs or more.

    python benchmarks/micro/large_sums.py --rows 128 256 512 1024 2048 --programs 32 64 132 --blocks 1024 2048 4096

Each member sums one slice of the words, and pushes it to all: it sends 2 (n - 1) / n of a tensor, the least there is.

    x of slice r  -->  parts of rank r      | flags     rank r: parts in the order of ranks, + residual
    sum of slice r  -->  results of all     | flags     all: results --> x

Packets as those of `raypp.ops.cuda.member_sums` would send twice the bytes. A flag for each program says instead that
its words are there: released after them, and acquired before they are read. The last line is JSON.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from member_processes import run_members
from member_sums import Way, by_nccl, sum_us

from raypp.ops.cuda.kernel_launch import Device, start
from raypp.ops.cuda.member_sums import _halves
from raypp.transport.ipc import member_region

member_region._ALL_BYTES = 128 << 20  # also in the members' processes, which import this file
_POLLS = 64
_FLAG_WORDS = 1 << 16


@triton.jit
def _await(flag, number, stop, POLLS: tl.constexpr):
    """Wait for a flag of this sum or the next one, unless a member has died."""
    seen, polls = tl.atomic_add(flag, 0, sem="acquire", scope="sys"), 0
    while seen - number < 0:
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        polls += 1
        if polls % POLLS == 0:  # noqa: SIM102 -- `and` would load each time
            if tl.load(stop, volatile=True) != 0:
                seen = number


@triton.jit(do_not_specialize=["num_quads", "slice_blocks", "part_blocks"])
def sum_slices(
    x,
    residual,
    addresses,
    counts,
    stop,
    num_quads,  # of four words: the compiler sees how they lie
    slice_blocks,  # of a member
    part_blocks,  # of a program
    PLACE: tl.constexpr,  # words that are kept for a slice
    FLAGS: tl.constexpr,
    RANK: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    TYPE: tl.constexpr,
    POLLS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Replace x by the sum of all members' x and the residual, of 16 bits an element, two in a word.

    A member's memory: flags [step, rank, program], then parts [half, rank, PLACE], then results of the same shape.
    """
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    here = tl.multiple_of(tl.load(addresses + RANK).to(tl.pointer_type(tl.int32)), 16)
    num_words, slice_words, begin = num_quads * 4, slice_blocks * BLOCK, program * part_blocks * BLOCK
    end = tl.minimum(program * part_blocks + part_blocks, slice_blocks) * BLOCK
    start(OVERLAPS)
    number = tl.load(counts + program, cache_modifier=".cg") + 1
    half = (number & 1).to(tl.int64) * COUNT * PLACE
    parts, results = FLAGS + half, FLAGS + 2 * COUNT * PLACE + half
    for rank in tl.static_range(COUNT):
        if rank != RANK:
            there = tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(tl.int32)), 16)
            for at in range(begin, end, BLOCK):
                place = at + tl.arange(0, BLOCK)
                inside = (place < end) & (rank * slice_words + place < num_words)
                word = tl.load(x + rank * slice_words + place, mask=inside, other=0)
                tl.store(there + parts + RANK * PLACE + place, word, mask=inside)
            tl.debug_barrier()  # the stores of all threads come before the flag
            tl.atomic_xchg(there + RANK * num_programs + program, number, sem="release", scope="sys")
    for rank in tl.static_range(COUNT):
        if rank != RANK:
            _await(here + rank * num_programs + program, number, stop, POLLS)
    tl.debug_barrier()
    for at in range(begin, end, BLOCK):
        place = at + tl.arange(0, BLOCK)
        own = RANK * slice_words + place
        inside = (place < end) & (own < num_words)
        low, high = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        for rank in tl.static_range(COUNT):
            if rank == RANK:
                word = tl.load(x + own, mask=inside, other=0)
            else:
                word = tl.load(here + parts + rank * PLACE + place, mask=inside, other=0, cache_modifier=".cg")
            low_part, high_part = _halves(word, TYPE)
            low += low_part
            high += high_part
        low_part, high_part = _halves(tl.load(residual + own, mask=inside, other=0), TYPE)
        low_bits = (low + low_part).to(TYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        word = ((high + high_part).to(TYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16) | low_bits
        tl.store(x + own, word, mask=inside)
        for rank in tl.static_range(COUNT):
            if rank != RANK:
                there = tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(tl.int32)), 16)
                tl.store(there + results + RANK * PLACE + place, word, mask=inside)
    tl.debug_barrier()
    for rank in tl.static_range(COUNT):
        if rank != RANK:
            there = tl.load(addresses + rank).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(there + (COUNT + RANK) * num_programs + program, number, sem="release", scope="sys")
    for rank in tl.static_range(COUNT):
        if rank != RANK:
            _await(here + (COUNT + rank) * num_programs + program, number, stop, POLLS)
            tl.debug_barrier()
            for at in range(begin, end, BLOCK):
                place = at + tl.arange(0, BLOCK)
                inside = (place < end) & (rank * slice_words + place < num_words)
                word = tl.load(here + results + rank * PLACE + place, mask=inside, other=0, cache_modifier=".cg")
                tl.store(x + rank * slice_words + place, word, mask=inside)
    tl.debug_barrier()
    tl.store(counts + program, number)


class SlicedSums:
    """Launches `sum_slices`."""

    def __init__(
        self, memory: Any, rank: int, count: int, device: Device, num_programs: int, block: int, place: int
    ) -> None:
        self._memory, self._rank, self._count, self._device = memory, rank, count, device
        self._block, self._place = block, place
        self._counts = torch.zeros(num_programs, dtype=torch.int32, device=device.torch_device)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Replace x by the sum, and return it. Shapes: both [N, H] contiguous, of 16 bits."""
        num_programs, num_words = len(self._counts), x.nbytes >> 2
        slice_blocks = triton.cdiv(num_words, self._count * self._block)
        assert num_words % 4 == 0
        assert slice_blocks * self._block <= self._place
        assert 2 * self._count * num_programs <= _FLAG_WORDS
        sum_slices[(num_programs,)](
            x.view(torch.int32),
            residual.view(torch.int32),
            self._memory.addresses,
            self._counts,
            self._memory.stop,
            num_words // 4,
            slice_blocks,
            triton.cdiv(slice_blocks, num_programs),
            PLACE=self._place,
            FLAGS=_FLAG_WORDS,
            RANK=self._rank,
            COUNT=self._count,
            BLOCK=self._block,
            TYPE=tl.bfloat16 if x.dtype == torch.bfloat16 else tl.float16,
            POLLS=_POLLS,
            OVERLAPS=self._device.has_dependent_launch,
            num_warps=8,
            **self._device.launch_options,
        )
        return x


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[128, 256, 512, 1024, 2048])
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--programs", type=int, nargs="+", default=[32, 64, 132])
    parser.add_argument("--blocks", type=int, nargs="+", default=[1024, 2048, 4096])
    args = parser.parse_args()
    run_members("large_sums", _measure, args)


def _measure(members: Any, device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    torch.cuda.set_stream(torch.cuda.Stream())
    place = max(args.rows) * args.hidden // 2 // members.count + max(args.blocks)
    for rows in args.rows:
        ways: dict[str, Way] = {"nccl": partial(by_nccl, members)}
        for num_programs in args.programs:
            for block in args.blocks:
                # Flags of other numbers of programs lie elsewhere: they begin anew with the counts.
                members.gathered(torch.zeros(1, device=device))
                sums = SlicedSums(
                    members.memory, members.rank, members.count, Device.of(device), num_programs, block, place
                )
                ways[f"{num_programs} programs of {block}"] = sums
        for name, way in ways.items():
            _clear_flags(members, device)
            figures[f"{rows} rows, {name}"] = us = sum_us(members, rows, args.hidden, way, device)
            if members.rank == 0:
                print(f"{rows:4d} x {args.hidden}, {name}: {us:.2f} us a sum", flush=True)
    return figures


def _clear_flags(members: Any, device: torch.device) -> None:
    """Set all flags of this member to 0 while no other sums."""
    torch.cuda.synchronize()
    members.gathered(torch.zeros(1, device=device))
    torch.cuda.synchronize()
    region = members.memory
    region._device.tensor(region._base, _FLAG_WORDS * 4).zero_()
    torch.cuda.synchronize()
    members.gathered(torch.zeros(1, device=device))
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()

"""Small sums over the members of a stage: each pushes its part into the others' memory, and all add in one order.

    x --> packets (4 bytes of x, the number of the sum) --> a place for this rank in each other member's memory
    own x, and packets of the others as they come       --> sum in the order of ranks, + residual --> x
                                                            or the parts of all members, side by side

A packet is written and read as one word of 8 bytes, so its number says that its bytes are there: no flag and no fence.
Sums take two halves of the memory in turn. A member can only be one sum ahead: each waits for parts of all, and its
kernel starts after its last one has ended. So whoever writes a half finds that all have read it. Each program counts
the sums on the device, whether it has work or not: a graph holds no number.

A wait looks at a word now and then, and ends when that is set: members die. The word is in the GPU's own memory: all
threads reading one of the host take 180 us, so that the others wait as long, look there themselves, and so on.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from raypp.members import MemberMemory, Members
from raypp.ops.cuda.kernel_launch import Device, start

_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_LEAST_WORDS = 128  # of a program
_MOST_WORDS_OF_FEW_WARPS = 512
_POLLS = 64


class PushedSums:
    """Sums of the members of a stage, in their memory where they are small; else by `Members.sum_`.

    Where the bits of a row must not depend on the rows beside it, large ones are made there, too, in pieces.

    Args:
        members: Of the stage. Until they have met, they have no memory.
        device: Of this member.
    """

    def __init__(self, members: Members, device: Device) -> None:
        self._members = members
        self._device = device
        # Nothing is multiplied, so one kernel serves all: what is warmed at start is what is captured.
        self._launch_options = replace(device, is_invariant=False).launch_options

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Replace x by the sum of all members' x and the residual, and return it.

        Shapes: x, residual [N, H] contiguous.
        """
        memory = None if self._members.is_alone else self._members.memory
        if memory is None or x.dtype not in _TYPES or x.nbytes & 3:
            return self._members.sum_(x).add_(residual)
        most_bytes = _most_bytes(memory, x.dtype)
        assert x.is_contiguous()
        if x.nbytes <= most_bytes:
            if x.nbytes:
                self._add(memory, x, residual)
        elif self._device.is_invariant:
            num_rows = most_bytes // (x.nbytes // len(x))
            for own, rest in zip(x.split(num_rows), residual.split(num_rows), strict=True):
                self._add(memory, own, rest)
        else:
            self._members.sum_(x).add_(residual)
        return x

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all members by rank, [count, ...].

        Shapes: x [...] contiguous, int32 or float32; of 16 numbers, or a multiple, for one size of kernels to do.
        """
        memory = None if self._members.is_alone else self._members.memory
        if memory is None or x.nbytes > memory.max_bytes or x.numel() % 16 or not x.numel():
            return self._members.gathered(x)
        of_all = x.new_empty(self._members.count, *x.shape)
        self._launch(memory, x.view(torch.int32), of_all.view(torch.int32), tl.int32)
        return of_all

    def _add(self, memory: MemberMemory, x: torch.Tensor, residual: torch.Tensor) -> None:
        self._launch(memory, x.view(torch.int32), residual.contiguous().view(torch.int32), _TYPES[x.dtype])

    def _launch(self, memory: MemberMemory, x: torch.Tensor, other: torch.Tensor, element: tl.dtype) -> None:
        num_programs, num_words = len(memory.counts), x.nbytes >> 2
        block = max(_LEAST_WORDS, triton.next_power_of_2(triton.cdiv(num_words, num_programs)))
        _push_and_sum[(num_programs,)](
            x,
            other,
            memory.addresses,
            memory.counts,
            memory.stop,
            num_words,
            RANK=self._members.rank,
            COUNT=self._members.count,
            MOST_WORDS=memory.max_bytes >> 2,
            BLOCK=block,
            TYPE=element,
            POLLS=_POLLS,
            OVERLAPS=self._device.has_dependent_launch,
            num_warps=4 if block <= _MOST_WORDS_OF_FEW_WARPS else 8,
            **self._launch_options,
        )


def _most_bytes(memory: MemberMemory, dtype: torch.dtype) -> int:
    """Return the largest tensor that is summed there. Numbers of 32 bits are few by token: one size of kernels does."""
    return memory.max_bytes if dtype.itemsize == 2 else min(memory.max_bytes, len(memory.counts) * _LEAST_WORDS * 4)


@triton.jit
def _halves(word, TYPE: tl.constexpr):
    """Return the two numbers of 16 bits in each word, in float32; of 32 bits, the number and 0."""
    if TYPE == tl.float32:  # noqa: SIM300
        low, high = word.to(tl.float32, bitcast=True), tl.zeros(word.shape, tl.float32)
    else:
        low = word.to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
        high = (word >> 16).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def _is_missing(packet, number, inside):
    """Return whether any packet is not of this sum, as 0 or 1."""
    return tl.max((inside & ((packet >> 32).to(tl.int32) != number)).to(tl.int32), 0)


@triton.jit
def _push_and_sum(
    x,
    other,  # the residual, or where parts go
    addresses,
    counts,
    stop,
    num_words,
    RANK: tl.constexpr,
    COUNT: tl.constexpr,
    MOST_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    TYPE: tl.constexpr,
    POLLS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    program = tl.program_id(0)
    place = program * BLOCK + tl.arange(0, BLOCK)
    inside = place < num_words
    here = tl.load(addresses + RANK).to(tl.pointer_type(tl.int64))
    start(OVERLAPS)
    number = tl.load(counts + program, cache_modifier=".cg") + 1
    half = (number & 1).to(tl.int64) * COUNT * MOST_WORDS
    own = tl.load(x + place, mask=inside, other=0)
    packet = (number.to(tl.int64) << 32) | (own.to(tl.int64) & 0xFFFFFFFF)
    for rank in tl.static_range(COUNT):
        if rank != RANK:
            there = tl.load(addresses + rank).to(tl.pointer_type(tl.int64))
            tl.store(there + half + RANK * MOST_WORDS + place, packet, mask=inside)
    low, high = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(COUNT):
        word = own
        if rank != RANK:
            source = here + half + rank * MOST_WORDS + place
            packet = tl.load(source, mask=inside, other=0, volatile=True)
            missing = _is_missing(packet, number, inside)
            polls = 0
            while missing != 0:
                packet = tl.load(source, mask=inside, other=0, volatile=True)
                missing = _is_missing(packet, number, inside)
                polls += 1
                if polls % POLLS == 0:  # noqa: SIM102 -- `and` would load each time
                    if tl.load(stop, volatile=True) != 0:
                        missing = 0
            word = packet.to(tl.int32)
        if TYPE == tl.int32:  # noqa: SIM300
            tl.store(other + rank * num_words + place, word, mask=inside)
        else:
            low_part, high_part = _halves(word, TYPE)
            low += low_part
            high += high_part
    if TYPE != tl.int32:  # noqa: SIM300
        low_part, high_part = _halves(tl.load(other + place, mask=inside, other=0), TYPE)
        if TYPE == tl.float32:  # noqa: SIM300
            bits = (low + low_part).to(tl.int32, bitcast=True)
        else:
            low_bits = (low + low_part).to(TYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
            bits = ((high + high_part).to(TYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16) | low_bits
        tl.store(x + place, bits, mask=inside)
    tl.debug_barrier()  # all threads have read the count
    tl.store(counts + program, number)

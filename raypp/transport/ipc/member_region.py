"""The GPU memory that the members of a stage share for small sums: each has an allocation that all others write into.

    own allocation: | half 0: place of rank 0 | place of rank 1 | ... | half 1: place of rank 0 | ... |

What is written there and when, `raypp.ops.cuda.member_sums` says. Memory is freed as that of links is, see `region.py`.
"""

from __future__ import annotations

import json
import logging
import time

import torch

from raypp.transport.ipc.cuda_device import CudaDevice
from raypp.transport.ipc.region import UnmapBarrier
from raypp.transport.rendezvous import Meeting

logger = logging.getLogger(__name__)

_ALL_BYTES = 4 << 20
"""The largest tensor that is summed there times the members, which each get it from each: above it, NCCL is as quick.

Figures: benchmarks/REPORT.md, "Members".
"""
_ALIGNMENT = 4096
NUM_PROGRAMS = 64
"""Of a sum. A program waits for the same one of each other member alone, so it needs no others beside it."""
_PACKET_BYTES = 2  # for each byte of a tensor
_CLOSE_TIMEOUT_S = 5.0


class MemberRegion:
    """One member's view; see `raypp.members.MemberMemory`.

    Args:
        device: Of this member.
        rank: Of this member.
        count: Of the members.
        meeting: Of these members alone; the constructor waits for the others.

    Raises:
        DeadlineError: another member did not come.
        ResourceError: there is not enough memory, or it cannot be shared.
    """

    def __init__(self, device: CudaDevice, rank: int, count: int, meeting: Meeting) -> None:
        self._device = device
        self._rank = rank
        self._barrier = UnmapBarrier(rank, "member")
        self._mapped: list[int] = []
        self.max_bytes = _ALL_BYTES // count // _ALIGNMENT * _ALIGNMENT
        num_bytes = 2 * count * self.max_bytes * _PACKET_BYTES
        self._base = device.allocate(num_bytes)
        device.tensor(self._base, num_bytes).zero_()
        self.counts = torch.zeros(NUM_PROGRAMS, dtype=torch.int32, device=device.torch_device)
        self.stop = torch.zeros(1, dtype=torch.int32, device=device.torch_device)
        device.settle()
        about = {"handle": device.export(self._base).hex(), "address": self._barrier.address}
        meeting.tell(f"memory {rank}", json.dumps(about))
        theirs = {peer: json.loads(meeting.ask(f"memory {peer}", peer)) for peer in range(count) if peer != rank}
        self._barrier.connect({peer: theirs[peer]["address"] for peer in theirs}, meeting.remaining_s)
        bases = {rank: self._base}
        for peer, said in theirs.items():
            bases[peer] = device.map(bytes.fromhex(said["handle"]))
            self._mapped.append(bases[peer])
        in_order = [bases[each] for each in range(count)]
        self.addresses = torch.tensor(in_order, dtype=torch.int64, device=device.torch_device)

    def abort(self) -> None:
        """End all waits on the device, from any thread."""
        self._device.force(self.stop.data_ptr(), 1)

    def close(self) -> None:
        """Unmap the others' memory, and free this one's once they have unmapped it; from the thread that used it."""
        ends = time.monotonic() + _CLOSE_TIMEOUT_S
        if not self._device.drain(_CLOSE_TIMEOUT_S, torch.cuda.current_stream(self._device.torch_device)):
            # Its sockets stay open until the process ends: closed, they would say that nothing is mapped any more.
            logger.warning("member %d leaves the others with sums in flight; their memory stays", self._rank)
            return
        self._barrier.give_back(self._device, self._mapped, self._base, ends)

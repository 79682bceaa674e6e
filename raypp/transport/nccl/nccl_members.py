"""The members of a stage on GPUs: sums and exchanges by NCCL, on the current stream, so that graphs hold them.

Small sums need no NCCL where GPUs reach each other, see `MemberMemory`. What hosts tell each other goes over another
way, see `HostMembers`. NCCL adds an element's parts in one order and hands the result to all ranks, so its bits are the
same on all members.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from raypp.errors import EngineDeadError
from raypp.members import MemberMemory, Members
from raypp.transport.gpu_access import CurrentStream
from raypp.transport.nccl.communicator import Communicator
from raypp.transport.rendezvous import Meeting

_TYPES = {torch.int32: 2, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
"""As NCCL numbers types (`ncclDataType_t` of nccl.h)."""
_SUM = 0
_LEAVE_S = 5.0


class HostMembers(Members, Protocol):
    """What processes of CPUs do; it is made before they meet."""

    def open(self, meeting: Meeting, *, own_host: str, deadline_s: float) -> None: ...


OpenMemory = Callable[[torch.device, int, int, Meeting], MemberMemory | None]
"""From device, rank, number of members and where they meet; None: the GPUs do not reach each other."""


class NcclMembers:
    """One process's; see `raypp.members.Members`.

    It is made before the members meet, and they may meet again.

    Args:
        host: The same members, over host memory.
        stage_index: Theirs.
        device: Of this process.
        open_memory: Opens what they share, whenever they meet.
    """

    def __init__(
        self, host: HostMembers, stage_index: int, device: torch.device, open_memory: OpenMemory | None = None
    ) -> None:
        self.rank, self.count = host.rank, host.count
        self._host = host
        self._stage_index = stage_index
        self._device = device
        self._communicator: Communicator | None = None
        self._current: CurrentStream | None = None
        self._open_memory = open_memory
        self._memory: MemberMemory | None = None
        self._is_building = False

    @property
    def memory(self) -> MemberMemory | None:
        """Of small sums; None: there is none."""
        return self._memory

    @property
    def is_alone(self) -> bool:
        """Whether the others take no part: see `building`."""
        return self._is_building and not torch.cuda.is_current_stream_capturing()

    def open(self, meeting: Meeting, *, own_host: str, deadline_s: float) -> None:
        """Meet the other members, and wait for them.

        Raises:
            ConfigError, DeadlineError, ResourceError: one did not come, or NCCL cannot join them.
        """
        self._host.open(meeting, own_host=own_host, deadline_s=deadline_s)
        device = self._device
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        name = f"the members of stage {self._stage_index}"
        self._communicator = Communicator(
            name, self.rank, self.count, first_index=self._stage_index, device=device, meeting=meeting
        )
        self._current = CurrentStream(device)
        if self._open_memory is not None:
            self._memory = self._open_memory(device, self.rank, self.count, meeting)

    @contextmanager
    def building(self) -> Iterator[None]:
        """Until this ends, sums that graphs do not capture are this member's alone.

        What runs before the first step compiles kernels and finds out what memory suffices for: in threads, in any
        order.
        """
        self._is_building = True
        try:
            yield
        finally:
            self._is_building = False

    def sum_(self, x: torch.Tensor) -> torch.Tensor:
        """Replace a contiguous tensor by the sum of all members' tensors."""
        assert x.is_contiguous()
        if x.numel() and not self.is_alone:
            address = x.data_ptr()
            communicator, stream = self._open()
            sum_all = communicator.nccl.all_reduce
            communicator.call(sum_all, address, address, x.numel(), _TYPES[x.dtype], _SUM, stream=stream)
        return x

    def gathered(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the tensors of all members by rank, [count, ...]; in `out` if that is given."""
        x = x.contiguous()
        parts = x.new_empty(self.count, *x.shape) if out is None else out
        if self.is_alone:
            parts.copy_(x)
        elif x.numel():
            communicator, stream = self._open()
            gather, addresses = communicator.nccl.all_gather, (x.data_ptr(), parts.data_ptr())
            communicator.call(gather, *addresses, x.numel(), _TYPES[x.dtype], stream=stream)
        return parts

    def from_first(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the tensor of host memory that the first member makes; the hosts wait for it."""
        return self._host.from_first(make)

    def abort(self) -> None:
        """End all waits, those of the devices too. From any thread."""
        memory, communicator = self._memory, self._communicator
        try:
            self._host.abort()
            if memory is not None:
                memory.abort()
        finally:
            if communicator is not None:
                communicator.abort()

    def close(self) -> None:
        """Leave the others, once what was enqueued is done."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()
        communicator, self._communicator = self._communicator, None
        leaving = None if communicator is None else communicator.leave()
        if leaving is not None:
            leaving.exception(_LEAVE_S)
        self._host.close()

    def _open(self) -> tuple[Communicator, Any]:
        if self._communicator is None or self._current is None:
            raise EngineDeadError(f"the members of stage {self._stage_index} have left")
        return self._communicator, self._current.get()

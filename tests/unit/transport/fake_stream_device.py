"""A device for `ipc` links without a GPU: memory of this process, and streams that are threads.

A stream does what it was given in order, and takes its time; flags are words of memory, as on a GPU.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable

import torch

from raypp.transport.gpu_access import tensor_at

_POLL_S = 0.0002


def has_reached(flag: int, value: int) -> bool:
    """Return whether a wait for `value` ends when the flag holds `flag`, as CUDA decides it."""
    return (flag - value) % (1 << 32) < 1 << 31


class FakeMemory:
    """What all devices of a test share: allocations by their handles."""

    def __init__(self) -> None:
        self.allocations: dict[int, ctypes.Array[ctypes.c_uint8]] = {}
        self.mapped: list[int] = []
        self.freed_while_mapped = False

    def allocate(self, num_bytes: int) -> int:
        # One word in front keeps the flags' alignment whatever ctypes does.
        memory = (ctypes.c_uint8 * (num_bytes + 8))()
        address = -(-ctypes.addressof(memory) // 8) * 8
        self.allocations[address] = memory
        return address

    def free(self, address: int) -> None:
        self.freed_while_mapped |= address in self.mapped
        del self.allocations[address]


class FakeStreamDevice:
    """See `CudaDevice`. One stream; `run` gives it work of a test's own."""

    def __init__(self, memory: FakeMemory) -> None:
        self._memory = memory
        self._mapped: list[int] = []
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._stream, daemon=True)
        self._thread.start()
        self.errors: list[BaseException] = []
        self.num_forced = 0

    def run(self, function: Callable[[], object]) -> None:
        """Enqueue work."""
        self._work.put(function)

    def allocate(self, num_bytes: int) -> int:
        return self._memory.allocate(num_bytes)

    def free(self, address: int) -> None:
        self._memory.free(address)

    def export(self, address: int) -> bytes:
        return address.to_bytes(8, "little")

    def map(self, handle: bytes) -> int:
        address = int.from_bytes(handle, "little")
        self._memory.mapped.append(address)
        return address

    def unmap(self, address: int) -> None:
        self._memory.mapped.remove(address)

    def tensor(self, address: int, num_bytes: int) -> torch.Tensor:
        return tensor_at(address, num_bytes, torch.device("cpu"))

    def wait(self, flag: int, value: int) -> None:
        def poll() -> None:
            while not has_reached(read_flag(flag), value):
                time.sleep(_POLL_S)

        self.run(poll)

    def write(self, flag: int, value: int) -> None:
        self.run(lambda: write_flag(flag, value))

    def force(self, flag: int, value: int) -> None:
        self.num_forced += 1
        write_flag(flag, value)

    def settle(self) -> None:
        assert self.drain(20.0)

    def drain(self, timeout_s: float) -> bool:
        done = threading.Event()
        self.run(done.set)
        return done.wait(timeout_s)

    def close(self) -> None:
        self._work.put(None)

    def _stream(self) -> None:
        while (function := self._work.get()) is not None:
            try:
                function()
            except BaseException as error:
                self.errors.append(error)


def read_flag(flag: int) -> int:
    return ctypes.c_uint32.from_address(flag).value


def write_flag(flag: int, value: int) -> None:
    ctypes.c_uint32.from_address(flag).value = value

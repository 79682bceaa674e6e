"""Memory that processes share in place of GPUs' memory: files in /dev/shm, removed when their owner frees them."""

from __future__ import annotations

import atexit
import ctypes
import itertools
import mmap
import os
import time
from pathlib import Path

import torch
from dry_tensor import DryTensor, on_device, waits

_NAMES = itertools.count()
_POLL_S = 0.0002


def device_tensor_at(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return memory as a tensor of a device."""
    from raypp.transport.gpu_access import tensor_at

    return DryTensor(tensor_at(address, num_bytes, torch.device("cpu")), on_device(device))


class DryDevice:
    """See `raypp.transport.ipc.cuda_device.CudaDevice`."""

    def __init__(self, device: torch.device) -> None:
        assert device.index is not None
        torch.cuda.set_device(device)
        self._device = device
        self._files: dict[int, Path] = {}
        self._maps: dict[int, mmap.mmap] = {}
        atexit.register(self._remove_files)

    def allocate(self, num_bytes: int) -> int:
        path = Path(f"/dev/shm/raypp-dry-{os.getpid()}-{next(_NAMES)}")
        path.write_bytes(b"")
        os.truncate(path, -(-num_bytes // 4096) * 4096)
        address = self._map(path)
        self._files[address] = path
        return address

    def free(self, address: int) -> None:
        self._files.pop(address).unlink()

    def export(self, address: int) -> bytes:
        return str(self._files[address]).encode().ljust(64, b"\0")

    def map(self, handle: bytes) -> int:
        return self._map(Path(handle.rstrip(b"\0").decode()))

    def unmap(self, address: int) -> None:
        self._maps.pop(address)  # tensors may still point there

    def tensor(self, address: int, num_bytes: int) -> torch.Tensor:
        return device_tensor_at(address, num_bytes, self._device)

    def wait(self, flag: int, value: int) -> None:
        while (ctypes.c_uint32.from_address(flag).value - value) % (1 << 32) >= 1 << 31:  # as CUDA compares flags
            time.sleep(_POLL_S)

    def write(self, flag: int, value: int) -> None:
        ctypes.c_uint32.from_address(flag).value = value

    def force(self, flag: int, value: int) -> None:
        self.write(flag, value)

    def settle(self) -> None:
        waits("settle")

    def drain(self, timeout_s: float) -> bool:
        return True

    def _remove_files(self) -> None:
        for path in self._files.values():
            path.unlink(missing_ok=True)

    def _map(self, path: Path) -> int:
        with path.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._maps[address] = memory
        _KEPT.append(memory)
        return address


_KEPT: list[mmap.mmap] = []

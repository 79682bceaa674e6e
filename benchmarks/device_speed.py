"""How fast a stage's device reads memory and multiplies matrices at best: what its steps are held against."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_TRIALS = 8
_BUFFER_BYTES = {"cuda": 4 << 30, "cpu": 1 << 28}
_MATRIX_SIZE = {"cuda": 8192, "cpu": 1024}


@dataclass(frozen=True)
class DeviceSpeed:
    """The best of some trials, on random data."""

    read_bytes_per_s: float
    flops_per_s: float
    """A product of two square matrices, in the model's type."""


def measure_device_speed(device: str, dtype: str) -> DeviceSpeed:
    """Measure the first device of that kind, in a process of its own, which leaves no memory behind.

    Args:
        device: `cpu` or `cuda`.
        dtype: Of the matrices, by its name in torch.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measure, (device, dtype))


def _measure(device: str, dtype: str) -> DeviceSpeed:
    torch.set_num_threads(1)  # as a stage on a CPU has at least
    buffer = torch.ones(_BUFFER_BYTES[device] // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(buffer)
    num_bytes = buffer.numel() * buffer.element_size()
    read = num_bytes / _best_s(lambda: buffer.sum(dtype=torch.int32), device)
    copied = 2 * num_bytes / _best_s(lambda: target.copy_(buffer), device)
    size = _MATRIX_SIZE[device]
    matrices = [torch.randn(size, size, device=device).to(getattr(torch, dtype)) for _ in range(2)]
    return DeviceSpeed(max(read, copied), 2 * size**3 / _best_s(lambda: matrices[0] @ matrices[1], device))


def _best_s(call: Callable[[], object], device: str) -> float:
    best_s = float("inf")
    for _ in range(_TRIALS):
        if device == "cpu":
            started = time.perf_counter()
            call()
            best_s = min(best_s, time.perf_counter() - started)
        else:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            best_s = min(best_s, begin.elapsed_time(end) / 1e3)
    return best_s

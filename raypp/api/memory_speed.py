"""How fast the devices of an engine can read their weights: measured on a CPU, from data sheets for GPUs."""

from __future__ import annotations

import time

import numpy as np

from raypp.api.timeline import MemorySpeed

_GPU_BYTES_PER_S = (  # data sheets; the first name that a GPU's own contains
    ("B200", 8.0e12),
    ("GH200", 4.9e12),
    ("H200", 4.8e12),
    ("H100 PCIe", 2.0e12),
    ("H100", 3.35e12),
    ("A100", 2.0e12),
    ("L40S", 0.864e12),
    ("A10G", 0.6e12),
    ("L4", 0.3e12),
    ("T4", 0.32e12),
)
_MAX_BUFFER_BYTES = 256 << 20
_NUM_TRIALS = 5


def gpu_memory_speed(name: str) -> MemorySpeed | None:
    """Return the data sheet's figure for a GPU, None for one that is not listed."""
    for part, bytes_per_s in _GPU_BYTES_PER_S:
        if part in name:
            return MemorySpeed(bytes_per_s, f"the data sheet of {part}")
    return None


def measure_cpu_memory_speed(num_bytes: int) -> MemorySpeed:
    """Measure how fast one thread reads as many bytes as a stage's weights have; small ones stay in the cache.

    Args:
        num_bytes: Of a stage's weights. More than 256 MiB says nothing new.
    """
    buffer = np.ones(max(1, min(num_bytes, _MAX_BUFFER_BYTES) // 8), np.int64)
    best_s = float("inf")
    for _ in range(_NUM_TRIALS):
        started = time.perf_counter()
        buffer.max()
        best_s = min(best_s, time.perf_counter() - started)
    return MemorySpeed(buffer.nbytes / best_s, f"measured on one thread over {buffer.nbytes / 1e6:.0f} MB")

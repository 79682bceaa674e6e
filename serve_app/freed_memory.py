"""Freed memory goes back to the system: a replica that read large bodies and images is as small as before."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_LARGE_BYTES = 1 << 20


def give_back_freed_memory() -> None:
    """Have glibc unmap large blocks when they are freed.

    By itself it raises its limit for such blocks, up to 32 MiB, as soon as one is freed; those that it then keeps lie
    between others and are seldom given back. Other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _LARGE_BYTES)

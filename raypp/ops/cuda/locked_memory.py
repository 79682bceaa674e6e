"""Page-locked main memory in large pieces, which a GPU copies to and from without its host.

It is locked where it lies: torch's own comes in powers of two. Locking takes a second for some GiB, so what its owner
leaves behind stays locked for the next owner of as much: for the next life of a stage that is kept.
"""

from __future__ import annotations

import weakref
from pathlib import Path

import torch

from raypp.errors import ResourceError
from raypp.ops.kv_cache import zeros_on_demand

_left_behind: list[torch.Tensor] = []
_CGROUP = Path("/sys/fs/cgroup")


def locked_memory(num_bytes: int, owner: object) -> torch.Tensor:
    """Return page-locked memory, [num_bytes] uint8, for as long as its owner lives. At start only: it takes seconds.

    What it holds is arbitrary.

    Raises:
        ResourceError: there is not so much memory to spare, or the system does not let it be locked.
    """
    if any(memory.nbytes == num_bytes for memory in _left_behind):
        torch.cuda.synchronize()  # whoever left it may have ordered copies that are under way
        memory = _left_behind.pop([memory.nbytes for memory in _left_behind].index(num_bytes))
    else:
        _unlock_what_is_left()
        memory = _lock(num_bytes)
    weakref.finalize(owner, _left_behind.append, memory).atexit = False
    return memory


def spare_bytes() -> int | None:
    """Return the main memory that this machine or container has to spare; None where the system does not tell."""
    found = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit != "max":
            used = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
            # What it has read of files, such as a checkpoint's, counts as its memory, and goes when memory is needed.
            files = int(used["active_file"]) + int(used["inactive_file"])
            found.append(int(limit) - int((_CGROUP / "memory.current").read_text()) + files)
    except (OSError, ValueError, KeyError):
        pass  # not Linux, or a container that shows neither
    return min(found, default=None)


def _lock(num_bytes: int) -> torch.Tensor:
    spare = spare_bytes()
    if spare is not None and num_bytes > spare:
        raise ResourceError(
            "there is too little main memory for KV blocks",
            got=f"{spare / 2**30:.2f} GiB to spare",
            expected=f"{num_bytes / 2**30:.2f} GiB, which will be page-locked",
            hint="lower cpu_kv_bytes; it is for each stage",
        )
    memory = zeros_on_demand(num_bytes, torch.uint8)
    status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), num_bytes, 0))
    if status:
        raise ResourceError(
            "the memory for KV blocks cannot be page-locked",
            got=f"CUDA error {status} for {num_bytes / 2**30:.2f} GiB",
            expected="a system that lets this process lock so much of its main memory",
            hint="lower cpu_kv_bytes, or raise the limit of locked memory (ulimit -l, a container's memory)",
        )
    return memory


def _unlock_what_is_left() -> None:
    while _left_behind:
        torch.cuda.cudart().cudaHostUnregister(_left_behind.pop().data_ptr())

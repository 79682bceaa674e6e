"""KV blocks in the main memory of the stages' machines: how many, and whether they fit."""

from __future__ import annotations

from collections.abc import Sequence

from raypp.config.engine_config import EngineConfig
from raypp.errors import ResourceError
from raypp.plan.hardware import Hardware

_STAGED_BYTES = 32 << 20
"""What a GPU holds of blocks on their way: enough for a link of 60 GB/s to be busy half a millisecond."""

_BYTES_PER_PLAN = 256 << 20
"""What a stage's plan may bring back beside others' steps: 5 ms of that link, about a decode step of an 8B model, and
mostly beside the steps before."""


_MOST_OF_MEMORY = 0.85
"""Of a machine's main memory: it stays locked, and Ray ends processes where more than 95 % is in use."""


def num_cpu_blocks(config: EngineConfig, block_bytes: Sequence[int]) -> int:
    """Return the KV blocks of every stage in CPU memory.

    Args:
        config: `cpu_kv_bytes` says how many.
        block_bytes: What a block takes on each stage.

    Raises:
        ResourceError: not even one.
    """
    num_bytes, largest = config.cache.cpu_kv_bytes, max(block_bytes)
    if num_bytes and num_bytes < largest:
        raise ResourceError(
            "cpu_kv_bytes is too small for one KV block",
            got=f"cpu_kv_bytes={num_bytes}",
            expected=f"at least {largest}, or 0 for none",
            hint="raise cpu_kv_bytes or lower block_size",
        )
    return num_bytes // largest


def num_staged_blocks(config: EngineConfig, block_bytes: Sequence[int]) -> int:
    """Return the blocks that every stage copies at a time; 0 without any in CPU memory."""
    largest = max(block_bytes)
    return min(config.cache.cpu_kv_bytes // largest, max(1, _STAGED_BYTES // largest))


def max_copied_blocks(block_bytes: Sequence[int]) -> int:
    """Return the most blocks that a plan brings back while others run."""
    return max(1, _BYTES_PER_PLAN // max(block_bytes))


def check_cpu_memory(config: EngineConfig, hardware: Hardware, cpu_kv_bytes: Sequence[int]) -> None:
    """Refuse blocks that a machine with GPUs has no main memory for.

    Args:
        config: Where the stages are to run.
        hardware: The main memory of a machine; 0, if not known, passes.
        cpu_kv_bytes: What the blocks take of each stage.

    Raises:
        ResourceError: says how much stages that are on one machine need together.
    """
    together = cpu_kv_bytes if _share_a_machine(config, hardware) else [max(cpu_kv_bytes)]
    needed, there = sum(together), hardware.memory_bytes
    if not there or needed <= _MOST_OF_MEMORY * there:
        return
    raise ResourceError(
        "the KV blocks in CPU memory do not fit the machine",
        got=f"{there / 2**30:.2f} GiB of main memory",
        expected=f"{needed / 2**30:.2f} GiB for those of {len(together)} of {len(cpu_kv_bytes)} stages to be at most "
        f"{_MOST_OF_MEMORY:.0%} of it",
        hint="lower cpu_kv_bytes; it is for each stage",
    )


def _share_a_machine(config: EngineConfig, hardware: Hardware) -> bool:
    """Return whether all stages are certain to be on one machine."""
    parallel = config.parallel
    if parallel.placement == "strict_pack":
        return True
    has_room = hardware.num_machines == 1 and parallel.num_stages * parallel.stage_num_gpus <= hardware.num_gpus
    return parallel.placement == "pack" and has_room

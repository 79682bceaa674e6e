"""Chooses the fastest kernels that a device and an installation have, once at start."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.util import find_spec

import torch

from raypp.errors import ConfigError
from raypp.members import Members
from raypp.ops.backend import KernelSet
from raypp.ops.block_store import BlockMover, BlockStore, RowStore, TorchBlockMover, TorchBlockStore
from raypp.ops.cpu.torch_kernels import TorchKernels
from raypp.ops.invariance_check import compare_rows
from raypp.ops.kv_cache import LayerCache, zeros_on_demand
from raypp.ops.sample.token_choice import TokenChoice, TorchTokenChoice
from raypp.ops.sample.vocabulary_part import VocabularyPart

_LOG = logging.getLogger(__name__)


def make_first_sums(
    members: Members, hidden_size: int, dtype: torch.dtype, device: torch.device, *, is_invariant: bool = False
) -> None:
    """Compile what sums the members' activations, and make a sum of each kind; all members do, at the same time.

    Args:
        members: Of the stage; they have met.
        hidden_size: Of an activation.
        dtype: Of activations.
        device: Of this member.
        is_invariant: Whether the bits of a row must not depend on the rows beside it; this is checked.

    Raises:
        ConfigError: `is_invariant`, and the members' GPUs do not reach each other, or bits differ.
    """
    if device.type == "cpu" or not _has_triton():
        return
    from raypp.ops.cuda.kernel_launch import Device
    from raypp.ops.cuda.member_sums import PushedSums

    sums, memory = PushedSums(members, Device.of(device, is_invariant=is_invariant)), members.memory
    if is_invariant and memory is None:
        raise ConfigError(
            "batch_invariant needs members that write into each other's memory: NCCL sums by the number of rows",
            got=f"{members.count} members whose GPUs have no peer access to each other",
            expected="tensor_parallel_size = 1, or GPUs with peer access (NCCL_P2P_DISABLE=1 denies it)",
            hint="more stages, or batch_invariant=false",
        )
    most_bytes = 0 if memory is None else memory.max_bytes
    most_rows = max(1, most_bytes // (hidden_size * dtype.itemsize))
    for rows in (*_powers_to(most_rows), most_rows, 2 * most_rows):  # the last by another way
        x = torch.zeros(rows, hidden_size, dtype=dtype, device=device)
        sums(x, torch.zeros_like(x))
    for rows in (1, 8):  # of a norm over all heads
        x = torch.zeros(rows, 2, device=device)
        sums(x, torch.zeros_like(x))
    for num_words in (*_powers_to(most_bytes >> 2), most_bytes >> 2):  # of what draws gather, 16 at least
        if num_words >= 16:
            sums.gathered(torch.zeros(num_words, dtype=torch.int32, device=device))
    if is_invariant:
        generator = torch.Generator(device).manual_seed(members.rank)
        x = torch.randn(2 * most_rows + 3, hidden_size, generator=generator, device=device).to(dtype)
        compare_rows("sum over the members", lambda x: sums(x, x.clone()), x)
    members.gathered(torch.zeros(1, device=device))


def _powers_to(most: int) -> list[int]:
    """Return the powers of two up to a number."""
    return [1 << exponent for exponent in range(most.bit_length())]


def choose_kernels(
    device: torch.device,
    dtype: torch.dtype,
    *,
    block_size: int = 16,
    max_query_len: int = 1,
    num_ring_entries: int = 1,
    kv_dtype: torch.dtype | None = None,
    for_compiler: bool = False,
    is_invariant: bool = False,
) -> KernelSet:
    """Return the fastest kernels that this device and installation have, and log what is missing for faster ones.

    Args:
        device: Where the stage computes.
        dtype: Of weights and activations.
        block_size: Of the KV cache.
        max_query_len: The most query tokens of a decode row, 1 + K.
        num_ring_entries: Steps whose attention may be planned at a time.
        kv_dtype: Of the KV cache; None: as `dtype`.
        for_compiler: Whether torch.compile is to be given projections: weights stay in the form that it knows.
        is_invariant: Whether the bits of a row must not depend on the rows beside it; only kernels of a GPU know this.

    Raises:
        ConfigError: `is_invariant`, and plain torch would compute.
    """
    if device.type == "cuda" and dtype not in (torch.bfloat16, torch.float16):
        _LOG.warning("%s on a GPU is computed by plain torch, without CUDA graphs: the kernels are for 16 bits", dtype)
    elif device.type == "cuda" and _has_triton():
        from raypp.ops.cuda.cuda_kernels import CudaKernels

        sizes = {"block_size": block_size, "max_query_len": max_query_len, "num_ring_entries": num_ring_entries}
        return CudaKernels(device, dtype, kv_dtype=kv_dtype, is_invariant=is_invariant, **sizes)
    if is_invariant:
        raise ConfigError(
            "batch_invariant needs raypp's kernels: plain torch cuts sums by the number of rows",
            got=f"{dtype} on {device.type}",
            expected="bfloat16 or float16 on a GPU, with Triton installed",
            hint="batch_invariant=false",
        )
    return TorchKernels(dtype, packs_weights=not for_compiler)


def choose_token_choice(device: torch.device, max_positions: int, part: VocabularyPart | None = None) -> TokenChoice:
    """Return the fastest choice of tokens on a device, for at most `max_positions` at a time.

    Args:
        device: Where logits are.
        max_positions: See above.
        part: Of a member of a stage, whose logits are given; None: all are.
    """
    if device.type != "cuda" or not _has_triton():
        return TorchTokenChoice(part)
    from raypp.ops.cuda.kernel_launch import Device, Workspace
    from raypp.ops.cuda.kernel_token_choice import KernelTokenChoice

    return KernelTokenChoice(max_positions, Device.of(device), Workspace(device), part)


def open_block_store(caches: Sequence[LayerCache], num_cpu_blocks: int, num_staged: int) -> BlockStore:
    """Return memory of the CPU for blocks of caches.

    Args:
        caches: Of layers with the same blocks.
        num_cpu_blocks: Blocks that there is room for.
        num_staged: Blocks that a GPU holds on their way at a time.

    Raises:
        ResourceError: the memory for a GPU cannot be page-locked.
    """
    if caches[0].keys.device.type != "cuda":
        return TorchBlockStore(caches, num_cpu_blocks)
    from raypp.ops.cuda.pinned_blocks import PinnedBlockStore

    mover: BlockMover = TorchBlockMover()
    if _has_triton():
        from raypp.ops.cuda.block_kernels import KernelBlockMover

        mover = KernelBlockMover()
    return PinnedBlockStore(caches, num_cpu_blocks, num_staged, mover)


def open_row_store(tensors: Sequence[torch.Tensor], num_places: int) -> BlockStore:
    """Return memory of the CPU for rows of tensors, [rows, ...] each.

    Raises:
        ResourceError: the memory for a GPU cannot be page-locked.
    """
    if tensors[0].device.type != "cuda":
        return RowStore(tensors, num_places, lambda num_bytes, owner: zeros_on_demand(num_bytes, torch.uint8))
    from raypp.ops.cuda.pinned_blocks import locked_memory

    return RowStore(tensors, num_places, locked_memory)


def _has_triton() -> bool:
    if find_spec("triton") is None:
        _LOG.warning(
            "Triton is not installed: plain torch computes, slowly and without CUDA graphs (pip install triton)"
        )
        return False
    return True

"""How kernels are launched: the device's size, and the overlap of a kernel's start with the end of the one before.

Programmatic dependent launch (CUDA programming guide, "Programmatic Dependent Launch"; compute capability 9 and later)
lets a kernel start while its predecessor still runs. What it may do before `start` returns is read what no kernel
writes: weights. Everything else comes after. All programs of all kernels call `start`, so "the kernel before has
finished" holds for the one before that too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@dataclass(frozen=True)
class Device:
    """What kernels must know of where they run.

    Args:
        torch_device: Where tensors are.
        num_processors: Streaming multiprocessors.
        has_dependent_launch: Whether kernels overlap as above.
        shared_bytes: The most shared memory that a program may have.
    """

    torch_device: torch.device
    num_processors: int
    has_dependent_launch: bool
    shared_bytes: int = 227 << 10  # of compute capability 9.0

    @classmethod
    def of(cls, device: torch.device) -> Device:
        """Return a CUDA device's description, or that of Triton's interpreter on a CPU."""
        if device.type != "cuda":
            return cls(device, num_processors=4, has_dependent_launch=False)
        properties = torch.cuda.get_device_properties(device)
        most = getattr(properties, "shared_memory_per_block_optin", cls.shared_bytes)  # torch's stub does not have it
        return cls(
            device,
            properties.multi_processor_count,
            has_dependent_launch=properties.major >= 9,
            shared_bytes=most,
        )

    @property
    def launch_options(self) -> dict[str, bool]:
        """Keyword arguments of every launch."""
        return {"launch_pdl": True} if self.has_dependent_launch else {}


@triton.jit
def start(OVERLAPS: tl.constexpr):
    """Wait until what earlier kernels wrote can be read, then let the next kernel come up."""
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def arrives_last(counter, num_programs):
    """Return whether all others of `num_programs` have come here before; the last one sets the counter back to 0.

    What they wrote before they came can then be read (past the first-level cache: `cache_modifier=".cg"`).
    """
    tl.debug_barrier()  # the stores of all threads come before the one that announces them
    is_last = tl.atomic_add(counter, 1, sem="acq_rel") == num_programs - 1
    if is_last:
        tl.store(counter, 0)
    return is_last

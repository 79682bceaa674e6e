"""What every kernel launch needs: the device's size, shared scratch memory, and the overlap with the kernel before.

Programmatic dependent launch (CUDA programming guide, "Programmatic Dependent Launch"; compute capability 9 and later)
lets a kernel start while its predecessor still runs. What it may do before `start` returns is read what no kernel
writes: weights; and, past the first-level cache (`.cg`), what the launch before the last wrote. Everything else comes
after. All programs of all kernels call `start`, so "the kernel before has finished" holds for the one before that too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # it knows no assembler

NUM_COUNTERS = 1 << 16


@dataclass(frozen=True)
class Device:
    """The properties of a device that launches depend on.

    Args:
        torch_device: Where tensors are.
        num_processors: Streaming multiprocessors.
        has_dependent_launch: Whether kernels overlap as above.
        shared_bytes: The most shared memory that a program may have.
        has_fp8: Whether it converts and multiplies float8_e4m3fn.
        is_interpreter: Whether Triton's interpreter runs kernels, which knows no assembly.
        name: The GPU's.
        is_invariant: Whether the bits of a row must not depend on the rows beside it: sums are cut by sizes alone.
    """

    torch_device: torch.device
    num_processors: int
    has_dependent_launch: bool
    shared_bytes: int = 227 << 10  # of compute capability 9.0
    has_fp8: bool = True
    is_interpreter: bool = False
    name: str = ""
    is_invariant: bool = False

    @classmethod
    def of(cls, device: torch.device, *, is_invariant: bool = False) -> Device:
        """Return a CUDA device's description, or that of Triton's interpreter on a CPU."""
        if device.type != "cuda":
            return cls(
                device,
                num_processors=4,
                has_dependent_launch=False,
                is_interpreter=True,
                is_invariant=is_invariant,
            )
        properties = torch.cuda.get_device_properties(device)
        most = getattr(properties, "shared_memory_per_block_optin", cls.shared_bytes)  # torch's stub does not have it
        return cls(
            device,
            properties.multi_processor_count,
            has_dependent_launch=properties.major >= 9,
            shared_bytes=most,
            has_fp8=(properties.major, properties.minor) >= (8, 9),
            name=properties.name,
            is_invariant=is_invariant,
        )

    @property
    def launch_options(self) -> dict[str, bool]:
        """Keyword arguments of every launch."""
        options = {"launch_pdl": True} if self.has_dependent_launch else {}
        # Whether a product and a sum are rounded once or twice must not differ between compiled forms of a kernel.
        return options | {"enable_fp_fusion": False} if self.is_invariant else options


class Workspace:
    """Scratch memory that kernels share: partial results of split work, and counters of programs that have finished.

    One compute stream uses it, kernel after kernel, so all can have the same bytes. It is allocated at first use, as
    large as the most that was reserved until then. Addresses never change after that: graphs hold them.

    Args:
        device: Where it is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._num_floats = 0
        self._floats: torch.Tensor | None = None
        self._counters: torch.Tensor | None = None

    def reserve(self, num_floats: int) -> None:
        """Say that a kernel will need so many. All reserve before any runs."""
        if num_floats > self._num_floats:
            assert self._floats is None, "reserved after the first use"
            self._num_floats = num_floats

    @property
    def floats(self) -> torch.Tensor:
        """Float32, of any content."""
        if self._floats is None:
            self._floats = torch.empty(self._num_floats, dtype=torch.float32, device=self._device)
        return self._floats

    @property
    def counters(self) -> torch.Tensor:
        """Int32, all zero between kernels; one per piece of work that several programs share."""
        if self._counters is None:
            self._counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=self._device)
        return self._counters


@triton.jit
def start(OVERLAPS: tl.constexpr):
    """Wait until what earlier kernels wrote can be read, then let the next kernel come up."""
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def fence_shared(OVERLAPS: tl.constexpr):
    """Let tensor cores see what was loaded into shared memory: between the loads and the products of a loop.

    Compute capability 9.0 asks for it (PTX ISA, "Async proxy"). Triton 3.6 leaves it out, 3.7 does it itself.
    """
    if OVERLAPS:
        tl.inline_asm_elementwise(
            "fence.proxy.async.shared::cta; // own fence $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def finished(total):
    """Return a sum of products that a loop goes on with, once tensor cores have read its operands.

    Compute capability 9.0 reads operands from registers, and ptxas before 13.3 may put what the loop's next turn does
    first into the same ones (triton-lang/triton issue 9433); Triton 3.7 has 12.8. Loops that make operands before they
    await anything need it. Attention awaits its scores first; that it needs nothing, tests find in its machine code.
    """
    if not IS_INTERPRETED:
        total = tl.inline_asm_elementwise("", "=r,0", [total], dtype=tl.float32, is_pure=True, pack=1)
    return total


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

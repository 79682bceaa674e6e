"""What the machine has that stages will run on."""

from __future__ import annotations

import os
from dataclasses import dataclass

_NO_GPUS = (0, "", 0, (0, 0))
_FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True)
class Hardware:
    """The machine that stages will run on."""

    num_cpu_cores: int
    memory_bytes: int = 0
    num_gpus: int = 0
    gpu_name: str = ""
    gpu_memory_bytes: int = 0  # of the smallest GPU
    gpu_capability: tuple[int, int] = (0, 0)  # the lowest compute capability; (0, 0): not known
    num_machines: int = 1  # that have these GPUs together; cores and memory are of the smallest

    @property
    def has_fp8(self) -> bool:
        """Whether the GPUs convert and multiply float8_e4m3fn."""
        return self.gpu_capability >= _FP8_CAPABILITY

    def threads_per_stage(self, num_stages: int) -> int:
        """Return the compute threads of each of `num_stages` stages on this machine; the driver needs a core, too."""
        return max(1, (self.num_cpu_cores - 1) // num_stages)

    @classmethod
    def of_this_machine(cls) -> Hardware:
        """Return what this process may use. Asks the driver's library, so that no GPU is touched."""
        num_gpus, gpu_name, gpu_memory_bytes, gpu_capability = _gpus()
        return cls(
            num_cpu_cores=len(os.sched_getaffinity(0)),
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            num_gpus=num_gpus,
            gpu_name=gpu_name,
            gpu_memory_bytes=gpu_memory_bytes,
            gpu_capability=gpu_capability,
        )


def _gpus() -> tuple[int, str, int, tuple[int, int]]:
    """Return how many GPUs there are, the first one's name, the bytes of the smallest, the lowest capability."""
    try:
        import pynvml
    except ImportError:  # the GPU extra is not installed: raypp could not compute on one
        return _NO_GPUS
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return _NO_GPUS
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in visible_indices(pynvml.nvmlDeviceGetCount())]
        if not handles:
            return _NO_GPUS
        memory_bytes = min(int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles)
        major, minor = min(pynvml.nvmlDeviceGetCudaComputeCapability(handle) for handle in handles)
        return len(handles), str(pynvml.nvmlDeviceGetName(handles[0])), memory_bytes, (major, minor)
    finally:
        pynvml.nvmlShutdown()


def visible_indices(count: int) -> list[int]:
    """Return the indices of the GPUs that CUDA_VISIBLE_DEVICES leaves; ids in other forms than numbers leave all."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return list(range(count))
    indices = [int(part) for part in visible.split(",") if part.strip().isdigit()]
    if visible.strip() and not indices:
        return list(range(count))
    return [index for index in indices if index < count]

"""What the machine has that stages will run on."""

from __future__ import annotations

import glob
import os
from dataclasses import dataclass
from typing import Any

from raypp.errors import install

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
    num_unusable_gpus: int = 0  # that the system has, while the extra `gpu` is not installed

    @property
    def complaint(self) -> str | None:
        """What to say where stages compute on CPUs beside GPUs; None: nothing."""
        if not self.num_unusable_gpus:
            return None
        return (
            f"this machine has GPUs ({self.num_unusable_gpus}), but raypp cannot use them without the extra gpu: "
            f"{install('gpu')}; `raypp doctor` says what else is missing"
        )

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
        return cls(
            num_cpu_cores=len(os.sched_getaffinity(0)),
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            **_gpus(),
        )


def _gpus() -> dict[str, Any]:
    """Return what `Hardware` says of GPUs."""
    try:
        import pynvml
    except ImportError:  # the extra `gpu` is not installed: raypp could not compute on one
        return {"num_unusable_gpus": len(visible_indices(len(device_files())))}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in visible_indices(pynvml.nvmlDeviceGetCount())]
        if not handles:
            return {}
        memory_bytes = min(int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles)
        major, minor = min(pynvml.nvmlDeviceGetCudaComputeCapability(handle) for handle in handles)
        return {
            "num_gpus": len(handles),
            "gpu_name": str(pynvml.nvmlDeviceGetName(handles[0])),
            "gpu_memory_bytes": memory_bytes,
            "gpu_capability": (major, minor),
        }
    finally:
        pynvml.nvmlShutdown()


def device_files() -> list[str]:
    """Return the files of the GPUs that the system has, such as /dev/nvidia0, whether raypp can use them or not."""
    return sorted(glob.glob("/dev/nvidia[0-9]*"))


def visible_indices(count: int) -> list[int]:
    """Return the indices of the GPUs that CUDA_VISIBLE_DEVICES leaves; ids in other forms than numbers leave all."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return list(range(count))
    indices = [int(part) for part in visible.split(",") if part.strip().isdigit()]
    if visible.strip() and not indices:
        return list(range(count))
    return [index for index in indices if index < count]

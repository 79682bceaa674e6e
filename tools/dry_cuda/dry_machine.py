"""What the machine says it has: GPUs by way of NVML, and FlashInfer."""

from __future__ import annotations

import importlib.machinery
import os
import sys
from types import ModuleType, SimpleNamespace


def num_gpus() -> int:
    """Return how many GPUs the machine has."""
    return int(os.environ.get("DRY_CUDA") or 0)


def num_visible() -> int:
    """Return how many of them this process sees."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return num_gpus() if visible is None else len([part for part in visible.split(",") if part.strip()])


def memory_bytes() -> int:
    """Return each one's memory."""
    return int(float(os.environ.get("DRY_GB", "8")) * (1 << 30))


def _module(name: str) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    sys.modules[name] = module
    return module


def install_pynvml() -> None:
    """Put a library in place that knows the machine's GPUs."""
    module = _module("pynvml")
    module.NVMLError = type("NVMLError", (Exception,), {})  # type: ignore[attr-defined]
    module.nvmlInit = module.nvmlShutdown = lambda: None  # type: ignore[attr-defined]
    module.nvmlDeviceGetCount = num_gpus  # type: ignore[attr-defined]
    module.nvmlDeviceGetHandleByIndex = lambda index: index  # type: ignore[attr-defined]
    module.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(  # type: ignore[attr-defined]
        total=memory_bytes(), free=memory_bytes(), used=0
    )
    module.NVML_P2P_CAPS_INDEX_NVLINK = module.NVML_P2P_STATUS_OK = 0  # type: ignore[attr-defined]
    module.nvmlDeviceGetP2PStatus = lambda *pair_and_kind: 0  # type: ignore[attr-defined]
    module.nvmlDeviceGetCudaComputeCapability = lambda handle: (9, 0)  # type: ignore[attr-defined]
    module.nvmlDeviceGetName = lambda handle: "NVIDIA H200 (dry)"  # type: ignore[attr-defined]


def install_flashinfer() -> None:
    """Put attention in place that is imported when it is used."""
    package = _module("flashinfer")

    def paged(*args, **kwargs):  # type: ignore[no-untyped-def]
        import dry_flashinfer

        return dry_flashinfer.PagedPrefill(*args, **kwargs)

    def ragged(*args, **kwargs):  # type: ignore[no-untyped-def]
        import dry_flashinfer

        return dry_flashinfer.RaggedPrefill(*args, **kwargs)

    package.BatchPrefillWithPagedKVCacheWrapper = paged  # type: ignore[attr-defined]
    package.BatchPrefillWithRaggedKVCacheWrapper = ragged  # type: ignore[attr-defined]

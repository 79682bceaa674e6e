"""Runs what needs GPUs without any: the same Python, launches that are checked, and almost nothing computed.

    tools/dry_cuda/run python -m pytest tests/gpu/test_hidden_waits.py -s
    DRY_CUDA=2 tools/dry_cuda/run python benchmarks/decode_latency.py --model qwen3-0.6b --load-format dummy

torch says that it has CUDA devices. Their tensors lie in main memory and say that they are on a GPU (`dry_tensor.py`).
What a GPU refuses is an error: mixed devices, a kernel that gets host memory, a wait while a graph is recorded. A
kernel's launch must fit its signature, and is counted by what Triton would compile for it. Kernels, products and
attention leave zeros; Triton's interpreter runs only those kernels whose results a driver hears of. So texts consist of
token 0: whether numbers are right, the tests of kernels tell. CUDA graphs are lists of operations, `ipc` links share
files, streams do at once what they are told.

    DRY_CUDA       how many GPUs there are; `run` sets it to 1
    DRY_GB         of memory that a GPU seems to have, default 8
    DRY_REPORT     a folder: each process writes what waited for the device, and which kernels would be compiled;
                   `summary` adds them up
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls functions once modules have been imported."""

    def __init__(self, hooks: dict[str, Callable[[ModuleType], None]]) -> None:
        self._hooks = hooks

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        hook = self._hooks.pop(fullname, None)
        if hook is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            hook(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Set the stage; torch, Ray and raypp are changed when they are imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ.setdefault("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "0")
    import dry_machine

    dry_machine.install_pynvml()
    dry_machine.install_flashinfer()

    def torch_hook(module: ModuleType) -> None:
        import dry_torch

        dry_torch.install()

    def interpreter_hook(module: ModuleType) -> None:
        import dry_kernels

        dry_kernels.install(module)

    def launch_hook(module: ModuleType) -> None:
        import dry_kernels

        dry_kernels.install_launch(module)

    def link_hook(module: ModuleType) -> None:
        import dry_links

        module.CudaDevice = dry_links.DryDevice  # type: ignore[attr-defined]

    def graphs_hook(module: ModuleType) -> None:
        import dry_links

        module.tensor_at = dry_links.device_tensor_at  # type: ignore[attr-defined]

    def stream_hook(module: ModuleType) -> None:
        import dry_torch

        module.CurrentStream = dry_torch.CurrentStream  # type: ignore[attr-defined]

    def ray_hook(module: ModuleType) -> None:
        manager = module.NvidiaGPUAcceleratorManager
        manager.get_current_node_num_accelerators = staticmethod(dry_machine.num_visible)
        manager.get_current_node_accelerator_type = staticmethod(lambda: "H200")

    hooks = {
        "torch": torch_hook,
        "triton.runtime.interpreter": interpreter_hook,
        "raypp.ops.cuda.kernel_launch": launch_hook,
        "raypp.transport.ipc.cuda_device": link_hook,
        "raypp.transport.gpu_access": stream_hook,
        "raypp.graphs.cuda_graphs": graphs_hook,
        "ray._private.accelerators.nvidia_gpu": ray_hook,
    }
    assert "torch" not in sys.modules
    sys.meta_path.insert(0, _AfterImport(hooks))

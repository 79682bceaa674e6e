"""Where kernels that were compiled at run time lie: whether an engine found them there, or compiled them itself."""

from __future__ import annotations

import os
from pathlib import Path

_FOLDERS = {  # the variable that moves it, and where it is otherwise
    "TRITON_CACHE_DIR": "~/.triton/cache",
    "FLASHINFER_WORKSPACE_BASE": "~",  # FlashInfer makes .cache/flashinfer under it
    "CUDA_CACHE_PATH": "~/.nv/ComputeCache",
}


def use_empty_caches(folder: Path) -> None:
    """Let this process, and those that it starts, keep compiled kernels under `folder`."""
    for name in _FOLDERS:
        os.environ[name] = str(folder / name.lower())


def count_cached_files() -> int:
    """Return how many files the caches hold: more after a start than before means that it compiled."""
    count = 0
    for name, default in _FOLDERS.items():
        folder = Path(os.environ.get(name, default)).expanduser()
        if name == "FLASHINFER_WORKSPACE_BASE":
            folder = folder / ".cache" / "flashinfer"
        count += sum(len(files) for _, _, files in os.walk(folder))
    return count

"""Where this folder is in PYTHONPATH, GPUs have the memory that LIMITED_MEMORY says: bytes by NVML's index, as JSON."""

import json
import os
from typing import Any

import pynvml

_whole = pynvml.nvmlDeviceGetMemoryInfo
_BYTES = {int(index): num_bytes for index, num_bytes in json.loads(os.environ.get("LIMITED_MEMORY", "{}")).items()}


def _limited(handle: Any, *args: Any) -> Any:
    memory = _whole(handle, *args)
    memory.total = _BYTES.get(pynvml.nvmlDeviceGetIndex(handle), memory.total)
    return memory


pynvml.nvmlDeviceGetMemoryInfo = _limited

"""Copies from the host to a device without waiting for them.

A copy from ordinary memory makes the host wait until the stream has done all earlier work: within a step, until the
end of that step and of the neighbour's. A copy from page-locked memory is queued like a kernel. torch keeps such
memory, and gives it out again only when the copies from it are done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_ALIGNMENT = 16  # bytes; a view of any type begins there
_TORCH_TYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.bool_): torch.bool,
    np.dtype(np.float32): torch.float32,
}


def concatenated(arrays: Sequence[NDArray[Any]], device: torch.device) -> torch.Tensor:
    """Return arrays joined along their first dimension, on the host; for a GPU in page-locked memory.

    A copy of it to the device, `non_blocking`, is queued. It may be dropped at once, and must not change before then.
    """
    shape = (sum(map(len, arrays)), *arrays[0].shape[1:])
    joined = torch.empty(shape, dtype=_TORCH_TYPES[arrays[0].dtype], pin_memory=device.type == "cuda")
    np.concatenate(arrays, out=joined.numpy())
    return joined


def to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return a copy of a host array on a device, of its type and shape; on a GPU the copy is queued.

    The array may be read-only, and may change as soon as this returns.
    """
    return to_device_together((array,), device)[0]


def to_device_together(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Return copies of several arrays. On a GPU they are parts of one tensor, so there is only one transfer."""
    if device.type != "cuda":
        return [_copy(array) for array in arrays]
    starts, num_bytes = [], 0
    for array in arrays:
        starts.append(num_bytes)
        num_bytes += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    staged = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    staged_np = staged.numpy()
    for array, start in zip(arrays, starts, strict=True):
        staged_np[start : start + array.nbytes].view(array.dtype)[:] = array.reshape(-1)
    copied = staged.to(device, non_blocking=True)
    return [
        copied[start : start + array.nbytes].view(_TORCH_TYPES[array.dtype]).view(array.shape)
        for array, start in zip(arrays, starts, strict=True)
    ]


def _copy(array: NDArray[Any]) -> torch.Tensor:
    """Return a copy in torch's memory: an empty numpy array has strides of 0, which views refuse."""
    copied = torch.empty(array.shape, dtype=_TORCH_TYPES[array.dtype])
    copied.numpy()[...] = array
    return copied

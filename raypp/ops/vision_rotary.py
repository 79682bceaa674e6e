"""The rotation of a vision tower's queries and keys: on a GPU one launch, elsewhere its twin."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch

from raypp.ops import reference

RotateQk = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(qkv, cos, sin) -> qkv, rotated in place; see `raypp.ops.reference.rotate_qk_`."""


def choose_rotate_qk(device: torch.device, dtype: torch.dtype) -> RotateQk:
    """Return the fastest rotation that this device and installation have."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or find_spec("triton") is None:
        return reference.rotate_qk_
    from raypp.ops.kernels.launch import Device
    from raypp.ops.kernels.vision_heads import rotate_qk_

    described = Device.of(device)
    return lambda qkv, cos, sin: rotate_qk_(qkv, cos, sin, described)

"""The rotation of a vision tower's queries and keys: on a GPU one launch, elsewhere its twin."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch

RotateQk = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(qkv, cos, sin) -> qkv, rotated in place; see `rotate_qk_`."""


def rotate_qk_(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate queries and keys of qkv [P, 3, heads, D] in place, and return it; cos and sin [P, D / 2] float32."""
    first, second = qkv[:, :2].float().chunk(2, -1)
    cos, sin = cos[:, None, None], sin[:, None, None]
    qkv[:, :2] = torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(qkv.dtype)
    return qkv


def choose_rotate_qk(device: torch.device, dtype: torch.dtype) -> RotateQk:
    """Return the fastest rotation that this device and installation have."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or find_spec("triton") is None:
        return rotate_qk_
    from raypp.ops.kernels.launch import Device
    from raypp.ops.kernels.vision_heads import rotate_qk_ as rotate_by_kernel

    described = Device.of(device)
    return lambda qkv, cos, sin: rotate_by_kernel(qkv, cos, sin, described)

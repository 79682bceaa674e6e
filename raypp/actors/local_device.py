"""Finds the GPU that Ray gave to this process, by torch's numbering."""

from __future__ import annotations

import os

import ray


def local_device(device: str) -> str:
    """Return the torch device of the GPU that Ray gave to this process, which sees all of them."""
    if device != "cuda":
        return device
    assigned = str(ray.get_gpu_ids()[0])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return f"cuda:{visible.split(',').index(assigned) if visible else assigned}"

"""The gate of a gated MLP in one launch. Twin: `plain_torch.silu_and_mul`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from raypp.ops.kernels.launch import Device, start

_BLOCK = 1024


def silu_and_mul(gate_up: torch.Tensor, device: Device) -> torch.Tensor:
    """Return silu(gate) * up, [T, I]. Shapes: gate_up [T, 2 * I] contiguous, the gate first. Computed in float32."""
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(num_tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens:
        _silu_and_mul[(num_tokens, triton.cdiv(size, _BLOCK))](
            gate_up,
            y,
            size,
            BLOCK=_BLOCK,
            OVERLAPS=device.has_dependent_launch,
            num_warps=4,
            **device.launch_options,
        )
    return y


@triton.jit
def silu(x):
    """Return x * sigmoid(x), float32."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _silu_and_mul(gate_up, y, size, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    start(OVERLAPS)
    gate = tl.load(gate_up + row * 2 * size + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * size + column, (silu(gate) * up).to(y.dtype.element_ty), mask=inside)

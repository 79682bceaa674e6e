"""Activations: the gate of a gated MLP (SwiGLU, arXiv:2002.05202), and GELU by tanh (arXiv:1606.08415)."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up. Shapes: gate_up [T, 2 * I], the gate first; returns [T, I]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def linear_gelu_tanh(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return gelu(x W^T + b) by the tanh approximation, [T, N]. Shapes: x [T, K]; weight [N, K]; bias [N].

    On a GPU, in half precision, the product applies it before it rounds: one launch in place of two. torch has that
    only under a private name, which means tanh on CUDA and the exact GELU on a CPU (pytorch PR 104061).
    """
    fused = getattr(torch, "_addmm_activation", None)
    if fused is None or not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float16):
        return F.gelu(F.linear(x, weight, bias), approximate="tanh")
    y: torch.Tensor = fused(bias, x, weight.t(), use_gelu=True)
    return y

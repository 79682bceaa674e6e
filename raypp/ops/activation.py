"""The gate of a gated MLP (SwiGLU, arXiv:2002.05202)."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up. Shapes: gate_up [T, 2 * I], the gate first; returns [T, I]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)

"""A product of weights and states in 16 bits whose result is float32: the logits of an LM head."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812


def linear_in_float32(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return x W^T, [T, N] float32, in `out` if that is given. Only a CPU rounds it to x's type first.

    Shapes: x [T, K]; weight [N, K]; out [T, N] float32.
    """
    if x.dtype == torch.float32:
        return torch.mm(x, weight.t(), out=out)
    if x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
    y = F.linear(x, weight).to(torch.float32)
    return y if out is None else out.copy_(y)

"""The product behind the LM head: float32 logits of weights and states that may be in 16 bits."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812


def linear_in_float32(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return x W^T, [T, N] float32, in `out` if that is given; not rounded to x's type before, but on a CPU.

    Shapes: x [T, K]; weight [N, K]; out [T, N] float32.
    """
    if x.dtype == torch.float32:
        return torch.mm(x, weight.t(), out=out)
    if x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
    y = F.linear(x, weight).to(torch.float32)
    return y if out is None else out.copy_(y)

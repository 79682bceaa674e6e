"""A linear layer whose weight is kept in oneDNN's blocked form where the CPU has that.

The weight is packed once at load, in place of the plain one. It is read from memory at twice the rate, and from two
rows on computes 2 to 5 times as fast, see docs/design/0002-cpu-attention.md.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from raypp.ops.linear_in_float32 import linear_in_float32


class Linear:
    """y = x W^T + b.

    Args:
        weight: [N, K]; not kept where a packed copy takes its place.
        bias: [N] or None.
        may_pack: Whether the weight may be kept in another form than torch's own.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, may_pack: bool = True) -> None:
        self._is_packed = may_pack and _can_pack(weight)
        self._weight: torch.Tensor = (
            torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None) if self._is_packed else weight
        )
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return y [T, N]. Shapes: x [T, K], of the weight's dtype."""
        if not self._is_packed:
            return F.linear(x, self._weight, self._bias)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self._weight, self._bias, "none", [], "")
        return y

    def in_float32(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return y in float32, without a bias; see `linear_in_float32`."""
        if not self._is_packed:
            return linear_in_float32(x, self._weight, out)
        y = self(x).to(torch.float32)
        return y if out is None else out.copy_(y)


def _can_pack(weight: torch.Tensor) -> bool:
    if weight.is_cuda or not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32

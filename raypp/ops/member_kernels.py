"""The operations of a stage that has several members: each has a part of the weights, and its results are summed.

    inputs are whole      norm_linear, norm_gated_linear        outputs are the member's part
    inputs are a part     add_linear, experts                   sum over the members, then the residual

The LM head gives the logits of the member's tokens, from which members choose together, see
`raypp.ops.sample.vocabulary_part`. Everything else is by head, or alike on all members, and is that of the device's
kernel set. All members call the same operations in the same order. Sums are in the order of ranks, so their bits are
the same on all members.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch

from raypp.members import Members
from raypp.ops.backend import AddedProjection, Experts, ExpertWeights, KernelSet, Router
from raypp.ops.weight import Weight


def with_members(kernels: KernelSet, members: Members | None) -> KernelSet:
    """Return the kernel set of a member.

    Args:
        kernels: Of the device.
        members: Of the stage; None: it has one, and the set is returned as it is.
    """
    return kernels if members is None else cast(KernelSet, _MemberKernels(kernels, members))


class _MemberKernels:
    def __init__(self, kernels: KernelSet, members: Members) -> None:
        self._kernels = kernels
        self._members = members
        self._sum = kernels.member_sum(members)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def in_8_bits(self) -> KernelSet:
        return with_members(self._kernels.in_8_bits(), self._members)

    def add_linear(
        self, weight: Weight, bias: torch.Tensor | None = None, norm: tuple[torch.Tensor, float] | None = None
    ) -> AddedProjection:
        """Return (x, residual) -> residual + the sum of x W^T + b over the members, or its norm, b once."""
        linear = self._kernels.linear(weight, bias if self._members.rank == 0 else None)
        sum_ = self._sum
        if norm is None:
            return lambda x, residual: sum_(linear(x), residual)
        normed = self._kernels.norm(*norm)
        return lambda x, residual: normed(sum_(linear(x), torch.zeros_like(residual))).add_(residual)

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        return self._sum(x, torch.zeros_like(x))

    def experts(self, norm_weight: torch.Tensor, eps: float, router: Router, weights: ExpertWeights) -> Experts:
        if weights.down_bias is not None and self._members.rank and not weights.num_others:  # it is added once
            weights = replace(weights, down_bias=torch.zeros_like(weights.down_bias))
        experts = self._kernels.experts(norm_weight, eps, router, weights)
        sum_ = self._sum

        def summed(hidden: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
            return sum_(experts(hidden, torch.zeros_like(hidden)), hidden if residual is None else residual)

        return summed

"""The operations of a stage that has several members: each has a part of the weights, and its results are summed.

    inputs are whole      norm_linear, norm_gated_linear        outputs are the member's part
    inputs are a part     add_linear, experts                   sum over the members, then the residual
    the LM head           logits of the member's tokens         all members' side by side

Everything else is by head, or alike on all members, and is that of the device's kernel set. All members call the same
operations in the same order. Sums are in the order of ranks, so their bits are the same on all members.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch

from raypp.ops.backend import AddedProjection, Experts, KernelSet, LMHead, Projection, Routing
from raypp.ops.weight import Weight


class Members(Protocol):
    """The members of one stage, from one of them."""

    rank: int
    count: int

    def sum_(self, x: torch.Tensor) -> torch.Tensor:
        """Replace a tensor by the sum of all members' tensors, and return it.

        Raises:
            DeadlineError: another member did not come in time.
            StageDiedError: another member is gone.
            EngineDeadError: `abort` was called.
        """

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        """Return the columns of all members side by side, [N, count * C]. Shapes: x [N, C]. Raises as `sum_`."""

    def from_first(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the tensor of host memory, int32 [n], that the first member makes. Raises as `sum_`.

        Args:
            make: Called on the first member alone.
        """

    def abort(self) -> None:
        """End all waits with an error, from any thread. The members cannot meet again."""

    def close(self) -> None:
        """Release everything."""


def with_members(kernels: KernelSet, members: Members | None, vocab_size: int) -> KernelSet:
    """Return the kernel set of a member.

    Args:
        kernels: Of the device.
        members: Of the stage; None: it has one, and the set is returned as it is.
        vocab_size: Of the model: the LM head's last part may be padded.
    """
    return kernels if members is None else cast(KernelSet, _MemberKernels(kernels, members, vocab_size))


def joined_outputs(project: Projection, members: Members | None, size: int) -> Projection:
    """Return a projection to the outputs of all members, [N, size]; `project` gives those of one.

    Args:
        project: Its last outputs may be padding on the last member.
        members: Of the stage; None: it has one, and the projection is returned as it is.
        size: The outputs of all, without padding.
    """
    if members is None:
        return project
    joined = members.joined
    return lambda x: joined(project(x))[:, :size].contiguous()


class _MemberKernels:
    def __init__(self, kernels: KernelSet, members: Members, vocab_size: int) -> None:
        self._kernels = kernels
        self._members = members
        self._vocab_size = vocab_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def in_8_bits(self) -> KernelSet:
        return with_members(self._kernels.in_8_bits(), self._members, self._vocab_size)

    def add_linear(self, weight: Weight, bias: torch.Tensor | None = None) -> AddedProjection:
        """Return (x, residual) -> residual + the sum of x W^T + b over the members, b once."""
        linear = self._kernels.linear(weight, bias if self._members.rank == 0 else None)
        sum_ = self._members.sum_
        return lambda x, residual: sum_(linear(x)).add_(residual)

    def experts(
        self,
        norm_weight: torch.Tensor,
        eps: float,
        router: torch.Tensor,
        gate_up: Weight,
        down: Weight,
        routing: Routing,
    ) -> Experts:
        experts = self._kernels.experts(norm_weight, eps, router, gate_up, down, routing)
        sum_ = self._members.sum_

        def summed(hidden: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
            of_member = sum_(experts(hidden, torch.zeros_like(hidden)))
            return of_member.add_(hidden if residual is None else residual)

        return summed

    def lm_head(
        self,
        weight: Weight,
        norm_weight: torch.Tensor | None = None,
        eps: float = 0.0,
        *,
        is_shared: bool = False,
    ) -> LMHead:
        of_part = self._kernels.lm_head(weight, norm_weight, eps, is_shared=is_shared)
        of_all = joined_outputs(of_part, self._members, self._vocab_size)
        return lambda x, out=None: of_all(x) if out is None else out.copy_(of_all(x))

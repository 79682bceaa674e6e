"""The sparse MLP of a layer on an NVIDIA GPU, in three launches for few tokens and five for more.

    few     route, gate_up_few, down_few
    more    route, arrange, gate_up_tiles, down_tiles, sum_of_experts

The launches depend on the number of tokens alone, so a CUDA graph can hold them.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import replace

import torch

from raypp.ops.cuda.expert_products import (
    down_few,
    down_tiles,
    gate_up_few,
    gate_up_tiles,
    has_kernel,
    sum_of_experts,
)
from raypp.ops.cuda.expert_tuning import ExpertCut, ExpertShape, choose_cut
from raypp.ops.cuda.kernel_launch import Device, Workspace
from raypp.ops.cuda.router_kernels import arrange, route
from raypp.ops.routing import Routing
from raypp.ops.weight import Weight

_LOG = logging.getLogger(__name__)


class CudaExperts:
    """See `raypp.ops.backend.Experts`.

    Args:
        norm_weight: [H].
        eps: Of the norm.
        router: [E, H], of the tokens' type.
        gate_up: [E, 2 I, H], the gate first.
        down: [E, H, I].
        routing: How experts are chosen.
        device: Where it runs.
        workspace: For what several programs share.
    """

    def __init__(
        self,
        norm_weight: torch.Tensor,
        eps: float,
        router: torch.Tensor,
        gate_up: Weight,
        down: Weight,
        routing: Routing,
        device: Device,
        workspace: Workspace,
    ) -> None:
        self._norm_weight = norm_weight
        self._eps = eps
        self._router = (router.float() * norm_weight.float()).to(router.dtype)
        self._gate_up, self._down = (_readable(weight, router.dtype, device) for weight in (gate_up, down))
        self._routing = routing
        self._device = device
        self._workspace = workspace
        kinds = (self._gate_up.kind, self._down.kind)
        self._shape = ExpertShape(down.num_outputs, down.num_inputs, len(down.data), routing.num_chosen, kinds)
        self._cuts: dict[int, ExpertCut] = {}

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after the MLP, [T, H]. Shapes: hidden [T, H] contiguous, may be overwritten."""
        return self.run(hidden, self.cut(len(hidden)))

    def cut(self, num_tokens: int) -> ExpertCut:
        """Return how so many tokens are cut."""
        cut = self._cuts.get(num_tokens)
        if cut is None:
            cut = self._cuts[num_tokens] = choose_cut(num_tokens, self._shape, self._device)
        return cut

    def run(self, hidden: torch.Tensor, cut: ExpertCut) -> torch.Tensor:
        """Do it with a cut of the caller's choice."""
        if not len(hidden):
            return hidden
        norm, chosen, device = (self._norm_weight, self._eps), self._routing.num_chosen, self._device
        routed = route(hidden, self._router, self._eps, self._routing, device, self._workspace)
        if not cut.tile_rows:
            y = gate_up_few(hidden, *norm, self._gate_up, routed, cut.gate_up, device)
            return down_few(y, hidden, self._down, routed, cut.down, device)
        experts, (kind, next_kind) = self._shape.num_experts, self._shape.kinds
        arranged = arrange(hidden, *norm, routed, experts, cut.tile_rows, kind, device)
        between = gate_up_tiles(self._gate_up, arranged, chosen, next_kind, hidden, cut.gate_up, device)
        y = down_tiles(between, self._down, arranged, chosen, hidden, cut.down, device)
        return sum_of_experts(y, routed, hidden, device)


def _readable(weight: Weight, dtype: torch.dtype, device: Device) -> Weight:
    """Return a weight of a form that the kernels read."""
    if not has_kernel(weight, dtype, device):
        if weight.kind != "plain":
            _log_widened(weight.kind, weight.block, weight.order is not None)
        weight = Weight(weight.dequantized(dtype))
    scale, zero = (None if part is None else part.contiguous() for part in (weight.scale, weight.zero))
    return replace(weight, data=weight.data.contiguous(), scale=scale, zero=zero)


@functools.cache
def _log_widened(kind: str, block: tuple[int, int], has_order: bool) -> None:
    order = " in an order of their own" if has_order else ""
    _LOG.warning(
        "no kernel of this device multiplies experts in %s with a scale per %d x %d weights%s: they become 16 bits",
        kind,
        *block,
        order,
    )

"""The sparse MLP of a layer on an NVIDIA GPU, in three launches for few tokens and five for more.

    few     route, gate_up_few, down_few
    more    route, arrange, gate_up_tiles, down_tiles, sum_of_experts

The launches depend on the number of tokens alone, so a CUDA graph can hold them.
"""

from __future__ import annotations

import torch

from raypp.ops.cuda.expert_products import down_few, down_tiles, gate_up_few, gate_up_tiles, sum_of_experts
from raypp.ops.cuda.expert_tuning import ExpertCut, ExpertShape, choose_cut
from raypp.ops.cuda.kernel_launch import Device, Workspace
from raypp.ops.cuda.router_kernels import arrange, route
from raypp.ops.routing import Routing


class CudaExperts:
    """See `raypp.ops.backend.Experts`.

    Args:
        norm_weight: [H].
        eps: Of the norm.
        router: [E, H].
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
        gate_up: torch.Tensor,
        down: torch.Tensor,
        routing: Routing,
        device: Device,
        workspace: Workspace,
    ) -> None:
        self._norm_weight = norm_weight
        self._eps = eps
        self._router = (router.float() * norm_weight.float()).to(down.dtype)
        self._gate_up = gate_up.contiguous()
        self._down = down.contiguous()
        self._routing = routing
        self._device = device
        self._workspace = workspace
        num_experts, hidden, intermediate = down.shape
        self._shape = ExpertShape(hidden, intermediate, num_experts, routing.num_chosen)
        self._cuts: dict[int, ExpertCut] = {}

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after the MLP, [T, H]. Shapes: hidden [T, H] contiguous, may be overwritten."""
        num_tokens = len(hidden)
        cut = self._cuts.get(num_tokens)
        if cut is None:
            cut = self._cuts[num_tokens] = choose_cut(num_tokens, self._shape, self._device)
        return self.run(hidden, cut)

    def run(self, hidden: torch.Tensor, cut: ExpertCut) -> torch.Tensor:
        """Do it with a cut of the caller's choice."""
        if not len(hidden):
            return hidden
        norm, chosen, device = (self._norm_weight, self._eps), self._routing.num_chosen, self._device
        routed = route(hidden, self._router, self._eps, self._routing, device, self._workspace)
        if not cut.tile_rows:
            y = gate_up_few(hidden, *norm, self._gate_up, routed, cut.gate_up, device)
            return down_few(y, hidden, self._down, routed, cut.down, device)
        arranged = arrange(hidden, *norm, routed, self._shape.num_experts, cut.tile_rows, device)
        y = gate_up_tiles(self._gate_up, arranged, chosen, cut.gate_up, device)
        y = down_tiles(y, self._down, arranged, chosen, cut.down, device)
        return sum_of_experts(y, routed, hidden, device)

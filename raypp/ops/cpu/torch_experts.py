"""The sparse MLP of a layer in plain torch, expert by expert: each reads its weights once, for all of its tokens.

On a GPU it asks the device for the number of each expert's tokens, so a CUDA graph cannot hold it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from raypp.ops.break_point import break_point
from raypp.ops.cpu.linear import Linear
from raypp.ops.cpu.rms_norm import RMSNorm
from raypp.ops.routing import Routing, choose_experts


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up. Shapes: gate_up [T, 2 * I], the gate first; returns [T, I]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


class TorchExperts:
    """See `raypp.ops.backend.Experts`.

    Args:
        norm: Of the tokens.
        router: [E, H].
        gate_up: [2 I, H] of each expert, the gate first.
        down: [H, I] of each expert.
        routing: How experts are chosen.
    """

    def __init__(
        self, norm: RMSNorm, router: torch.Tensor, gate_up: list[Linear], down: list[Linear], routing: Routing
    ) -> None:
        self._norm = norm
        self._router = router
        self._gate_up = gate_up
        self._down = down
        self._routing = routing

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after the MLP, [T, H]. Shapes: hidden [T, H], left as it is."""
        normed = self._norm(hidden)
        experts, weights = choose_experts(F.linear(normed, self._router), self._routing)
        out = torch.empty_like(hidden)
        self._add_sum(hidden, normed, experts, weights, out)
        return out

    @break_point
    def _add_sum(
        self,
        hidden: torch.Tensor,
        normed: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Write the residual stream to `out`. How often each expert is chosen decides what is launched."""
        if not len(hidden):
            return
        num_tokens, num_chosen = experts.shape
        by_expert = experts.flatten().argsort(stable=True)
        counts = torch.bincount(experts.flatten(), minlength=len(self._down)).tolist()
        x = normed.index_select(0, by_expert // num_chosen)
        y = _each(self._down, silu_and_mul(_each(self._gate_up, x, counts)), counts)
        of_pairs = torch.empty_like(y).index_copy_(0, by_expert, y).view(num_tokens, num_chosen, -1)
        out.copy_((of_pairs * weights.unsqueeze(2)).sum(1).add_(hidden))


def _each(linears: list[Linear], x: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Return the outputs of linear layers, each of its own rows. Shapes: x [sum of counts, K]; returns [.., N]."""
    parts = zip(linears, x.split(counts), strict=True)
    return torch.cat([linear(rows) for linear, rows in parts if len(rows)])

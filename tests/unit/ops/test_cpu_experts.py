"""The sparse MLP in torch against its twin, token by token; recorded on a tape it follows each step's own routing."""

from __future__ import annotations

import pytest
import reference_ops as reference
import torch
from op_tape import OpTapes

from raypp.graphs.pieces import PieceRecorder
from raypp.ops.backend import GELU, ExpertWeights, Gate, Router, Routing, choose_experts
from raypp.ops.cpu.torch_kernels import TorchKernels
from raypp.ops.weight import Weight

HIDDEN, SIZE = 24, 16


def _layer(num_experts, routing, dtype=torch.float32, *, packs_weights=True):
    generator = torch.Generator().manual_seed(num_experts)

    def normal(*shape, scale=1.0):
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    norm, router = 1 + 0.2 * normal(HIDDEN), normal(num_experts, HIDDEN)
    gate_up = normal(num_experts, 2 * SIZE, HIDDEN, scale=HIDDEN**-0.5)
    down = normal(num_experts, HIDDEN, SIZE, scale=SIZE**-0.5)
    kernels = TorchKernels(dtype, packs_weights=packs_weights)
    weights = ExpertWeights(Weight(gate_up), Weight(down))
    layer = kernels.experts(norm, 1e-6, Router(router, routing), weights)
    return layer, (norm, 1e-6, router, gate_up, down, routing)


def _tokens(count, seed=0):
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("num_experts", "num_chosen"), [(1, 1), (3, 2), (5, 1), (4, 4), (60, 6)])
@pytest.mark.parametrize("normalizes", [False, True])
def test_equals_the_twin(num_experts, num_chosen, normalizes):
    layer, arguments = _layer(num_experts, Routing(num_chosen, normalizes))
    for count in (0, 1, 7, 70):
        hidden = _tokens(count)
        before = hidden.clone()
        torch.testing.assert_close(layer(hidden), reference.experts(hidden, *arguments), rtol=1e-5, atol=1e-5)
        assert torch.equal(hidden, before)


def test_a_router_with_a_norm_and_factors_of_its_own():
    _, (norm, eps, router, gate_up, down, routing) = _layer(5, Routing(2, normalizes=True))
    of_router, scales = torch.linspace(0.5, 2.0, HIDDEN), torch.linspace(0.5, 2.0, 5)
    weights = ExpertWeights(Weight(gate_up), Weight(down), gate=GELU)
    layer = TorchKernels(torch.float32).experts(
        norm, eps, Router(router, routing, None, None, of_router, scales), weights
    )
    hidden = _tokens(7)
    expected = reference.experts(hidden, norm, eps, router, gate_up, down, routing, GELU, of_router, scales)
    torch.testing.assert_close(layer(hidden), expected, rtol=1e-5, atol=1e-5)
    gate, up = _tokens(3), _tokens(3, seed=1)
    plain = Gate(GELU.alpha, cubic=GELU.cubic, limit=1e9)  # by the formula of kernels
    torch.testing.assert_close(plain(gate, up), GELU(gate, up), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits(dtype):
    layer, arguments = _layer(5, Routing(5, normalizes=True), dtype)  # all: rounding chooses no others
    hidden = _tokens(9).to(dtype)
    got = layer(hidden)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), reference.experts(hidden, *arguments).float(), rtol=2e-2, atol=4e-2)


def test_even_routing_spreads_tokens():
    """Tokens that are nearly the same choose the same experts, but for measurements."""
    hidden = _tokens(1) + 1e-3 * _tokens(64, seed=1)
    norm = hidden * hidden.square().mean(-1, keepdim=True).rsqrt()
    for is_even in (False, True):
        routing = Routing(4, normalizes=True, is_even=is_even)
        layer, arguments = _layer(60, routing)
        chosen, weights = choose_experts(norm @ arguments[2].T, routing)
        assert (len(chosen.unique()) >= 55) == is_even
        torch.testing.assert_close(weights.sum(1), torch.ones(64))
        assert layer(hidden).isfinite().all()


def test_a_recorded_step_follows_its_own_routing():
    layer, arguments = _layer(60, Routing(2, normalizes=True))
    hidden = _tokens(6)
    replay, out = PieceRecorder(OpTapes()).record(lambda: layer(hidden), breakable=False)
    for seed in range(1, 4):
        hidden.copy_(_tokens(6, seed))
        replay()
        torch.testing.assert_close(out, reference.experts(hidden, *arguments), rtol=1e-5, atol=1e-5)


def test_weights_that_are_not_finite_disturb_no_other_token():
    """As padding has them."""
    layer, arguments = _layer(5, Routing(2, normalizes=True))
    hidden = _tokens(4)
    hidden[2] = torch.nan
    got, rows = layer(hidden), [0, 1, 3]
    torch.testing.assert_close(got[rows], reference.experts(hidden[rows], *arguments), rtol=1e-5, atol=1e-5)

"""The check of `batch_invariant` at start: raypp's kernels pass it, others are named. In Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable

import kernel_checks as checks
import pytest
import torch

from raypp.errors import ConfigError
from raypp.ops import invariance_check
from raypp.ops.attention import Heads
from raypp.ops.backend import ExpertWeights, Router, Routing
from raypp.ops.cpu.torch_kernels import TorchKernels
from raypp.ops.cuda.cuda_kernels import CudaKernels
from raypp.ops.invariance_check import InvarianceCheck
from raypp.ops.weight import Weight, quantize_rows

DTYPE = torch.bfloat16 if checks.IS_GPU else torch.float32
BLOCK_SIZE = 16


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is slow, and a library's order of sums must not decide there."""
    if checks.IS_GPU:
        return
    checks.sum_products_in_order(monkeypatch)
    monkeypatch.setattr(invariance_check, "_MOST_ROWS", 140)
    monkeypatch.setattr(invariance_check, "_PARTS", (slice(0, 1), slice(2, 9), slice(3, 36), slice(60, 140)))
    monkeypatch.setattr(invariance_check, "_LENGTH", 300)
    monkeypatch.setattr(invariance_check, "_CHUNK", 140)
    monkeypatch.setattr(invariance_check, "_DECODE_LENGTHS", (300, 257, 256, 3))


def weight(*shape: int) -> Weight:
    generator = torch.Generator(checks.DEVICE).manual_seed(0)
    return Weight(torch.randn(shape, generator=generator, device=checks.DEVICE).mul_(shape[-1] ** -0.5).to(DTYPE))


def in_8_bits(*shape: int) -> Weight:
    data, scale = quantize_rows(weight(*shape).data)
    return Weight(data, scale[:, None], block=(1, shape[1]))


def ones(size: int) -> torch.Tensor:
    return torch.ones(size, dtype=DTYPE, device=checks.DEVICE)


def experts_of(check: InvarianceCheck) -> None:
    weights = ExpertWeights(weight(8, 64, 64), weight(8, 64, 32))
    check.experts(ones(64), 1e-5, Router(weight(8, 64).data, Routing(2, True)), weights)


MAKERS: dict[str, Callable[[InvarianceCheck], object]] = {
    "norm": lambda check: check.norm(ones(64), 1e-5),
    "linear": lambda check: check.linear(weight(96, 600), ones(96)),
    "linear in 8 bits": lambda check: check.linear(in_8_bits(64, 256)),
    "norm_linear": lambda check: check.norm_linear(ones(64), 1e-5, weight(96, 64)),
    "norm_gated_linear": lambda check: check.norm_gated_linear(ones(64), 1e-5, weight(96, 64)),
    "add_linear": lambda check: check.add_linear(weight(64, 560)),
    "add_linear and norm": lambda check: check.add_linear(weight(64, 40), None, (ones(64), 1e-5)),
    "lm_head": lambda check: check.lm_head(weight(200, 64), ones(64), 1e-5),
    "experts": experts_of,
    "attention": lambda check: check.attention(Heads(4, 2, 16)),
    "attention in a window": lambda check: check.attention(Heads(2, 1, 24, window=100, soft_cap=3.0)),
}
FULL = {"linear in 8 bits", "add_linear and norm", "experts", "attention in a window"}


@pytest.mark.parametrize("made", [pytest.param(name, marks=[pytest.mark.full] * (name in FULL)) for name in MAKERS])
def test_rows_have_the_same_bits_beside_others(made: str) -> None:
    sizes = {"block_size": BLOCK_SIZE, "max_query_len": 1, "num_ring_entries": 1}
    kernels = CudaKernels(checks.DEVICE, DTYPE, **sizes, is_invariant=True)
    check = InvarianceCheck(kernels, checks.DEVICE, DTYPE, DTYPE, BLOCK_SIZE)
    MAKERS[made](check)
    check.run()


@pytest.mark.parametrize(
    ("made", "named"),
    [("linear", "product of 600 inputs and 96 outputs"), pytest.param("attention", "4 query", marks=pytest.mark.full)],
)
def test_an_operation_whose_rows_depend_on_others_is_named(made: str, named: str) -> None:
    kernels = CudaKernels(checks.DEVICE, DTYPE, block_size=BLOCK_SIZE, max_query_len=1, num_ring_entries=1)
    check = InvarianceCheck(kernels, checks.DEVICE, DTYPE, DTYPE, BLOCK_SIZE)
    MAKERS[made](check)
    with pytest.raises(ConfigError, match="batch_invariant does not hold here") as raised:
        check.run()
    assert named in str(raised.value.got)


def test_one_of_each_shape_is_checked() -> None:
    check = InvarianceCheck(TorchKernels(torch.float32), torch.device("cpu"), torch.float32, torch.float32, BLOCK_SIZE)
    first, second = (check.norm(torch.ones(8), 1e-5) for _ in range(2))
    assert first is not second  # what is made is what the kernel set made
    assert len(check._operations) == 1


def test_logits_do_not_depend_on_a_draft_head_that_shares_the_lm_head() -> None:
    """With one, the norm is by itself; without one, its weight would be folded into the LM head's, and rounded."""
    sizes = {"block_size": BLOCK_SIZE, "max_query_len": 1, "num_ring_entries": 1}
    kernels = CudaKernels(checks.DEVICE, DTYPE, **sizes, is_invariant=True)
    norm_weight, x = 1 + weight(1, 64).data[0], weight(5, 64).data
    whole = kernels.lm_head(weight(200, 64), norm_weight, 1e-5)(x)
    assert torch.equal(whole, kernels.lm_head(weight(200, 64))(kernels.norm(norm_weight, 1e-5)(x)))

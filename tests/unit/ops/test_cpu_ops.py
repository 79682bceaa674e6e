"""Norm, activation, rotary embedding and linear layers against their plain twins."""

from __future__ import annotations

import pytest
import reference_ops as reference
import torch
import torch.nn.functional as F  # noqa: N812

from raypp.ops.attention import apply_rotary, rotation
from raypp.ops.cpu.torch_kernels import Linear, RMSNorm, silu_and_mul
from raypp.ops.vision import linear_gelu_tanh

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def _assert_close(got, expected, dtype, scale=1.0):
    assert got.dtype == dtype
    torch.testing.assert_close(got, expected, atol=TOLERANCE[dtype] * scale, rtol=TOLERANCE[dtype])


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (7, 64), (3, 6, 16)])
def test_rms_norm(generator, dtype, shape):
    x = torch.randn(shape, generator=generator).to(dtype)
    weight = torch.randn(shape[1:], generator=generator).to(dtype)
    before = x.clone()
    _assert_close(RMSNorm(weight, 1e-5)(x), reference.rms_norm(x, weight, 1e-5), dtype, scale=3)
    assert torch.equal(x, before)


@pytest.mark.parametrize("magnitude", [0.0, 1e-4, 1e4])
def test_rms_norm_at_extremes(magnitude):
    """The epsilon decides when the vector is small, and nothing overflows when it is large."""
    x, weight = torch.ones(2, 32) * magnitude, torch.full((32,), 2.0)
    _assert_close(RMSNorm(weight, 1e-6)(x), reference.rms_norm(x, weight, 1e-6), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul(generator, dtype):
    gate_up = torch.randn(5, 48, generator=generator).to(dtype)
    before = gate_up.clone()
    _assert_close(silu_and_mul(gate_up), reference.silu_and_mul(gate_up), dtype)
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_is_the_tanh_approximation(generator, dtype):
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((64, 24), (40, 24), (40,)))
    product = F.linear(x, weight, bias)
    _assert_close(linear_gelu_tanh(x, weight, bias), F.gelu(product, approximate="tanh"), dtype)
    if dtype == torch.float32:
        assert not torch.allclose(linear_gelu_tanh(x, weight, bias), F.gelu(product), atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_of_a_slice_of_heads(generator, dtype):
    positions = torch.tensor([0, 1, 77, 4095])
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    heads = torch.randn(4, 6, 16, generator=generator).to(dtype)[:, :5]  # as queries and keys lie beside the values
    rotated = apply_rotary(heads, rotation(positions, frequencies, dtype))
    assert rotated.shape == heads.shape
    _assert_close(rotated, reference.apply_rotary(heads, positions, frequencies), dtype, scale=3)
    assert torch.equal(rotated[0], heads[0])  # position 0 is not rotated


def test_rotary_makes_scores_depend_on_distance_alone(generator):
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    q, k = torch.randn(2, 1, 1, 16, generator=generator)

    def score(query_position, key_position):
        positions = torch.tensor([query_position, key_position])
        rotated = apply_rotary(torch.cat((q, k)), rotation(positions, frequencies, torch.float32))
        return (rotated[0] * rotated[1]).sum()

    torch.testing.assert_close(score(9, 4), score(105, 100), atol=1e-4, rtol=1e-4)
    assert abs(score(9, 4) - score(9, 5)) > 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 2, 9])
@pytest.mark.parametrize("has_bias", [True, False])
def test_linear(generator, dtype, rows, has_bias):
    weight = torch.randn(24, 16, generator=generator).to(dtype)
    bias = torch.randn(24, generator=generator).to(dtype) if has_bias else None
    x = torch.randn(rows, 16, generator=generator).to(dtype)
    _assert_close(Linear(weight, bias)(x), F.linear(x, weight, bias), dtype, scale=8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("may_pack", [True, False])
def test_a_product_in_float32(generator, dtype, may_pack):
    weight, x = (torch.randn(rows, 16, generator=generator).to(dtype) for rows in (24, 3))
    linear, places = Linear(weight, may_pack=may_pack), torch.zeros(4, 24)
    got = linear.in_float32(x)
    assert got.dtype == torch.float32
    _assert_close(got.to(dtype), F.linear(x, weight), dtype, scale=8)
    assert torch.equal(linear.in_float32(x, places[:3]), got)
    assert torch.equal(places[:3], got)
    assert not places[3].any()

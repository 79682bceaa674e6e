"""Weights in 8 bits: how far they are from what they stand for."""

from __future__ import annotations

import pytest
import torch

from raypp.ops.weight import quantize_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_elements_are_near_whatever_the_size_of_their_row(dtype):
    sizes = torch.logspace(-20, 20, 5000)[:, None]
    weight = (torch.randn(5000, 33, generator=torch.Generator().manual_seed(0)) * sizes).to(dtype)
    quantized, scale = quantize_rows(weight)
    assert (quantized.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.float32)
    got, expected = quantized.float() * scale[:, None], weight.float()
    largest = expected.abs().amax(1, keepdim=True)
    assert ((got - expected).abs() <= torch.maximum(expected.abs() / 16, largest / 2**18)).all()
    torch.testing.assert_close(got.abs().amax(1, keepdim=True), largest)  # each row's largest stays


def test_rows_of_zeros_stay():
    quantized, scale = quantize_rows(torch.zeros(2, 3))
    assert not quantized.float().any()
    assert scale.isfinite().all()
    assert (scale > 0).all()

"""Products of 8 bits by the library (cuBLASLt, CUTLASS), for many rows: which of them this torch and device have.

The functions' names and the scales' layouts have changed between versions of torch, so each way is tried once, on a
small product whose result is known.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch

from raypp.ops.cuda.token_quantization import QuantizedTokens
from raypp.ops.weight import Weight

Product = Callable[[QuantizedTokens, torch.Tensor, torch.Tensor], torch.Tensor]
"""(x, weight [N, K], its prepared scale) -> x W^T, [T', N] in bfloat16."""

BLOCK = 128

_LOG = logging.getLogger(__name__)


def by_output(x: QuantizedTokens, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return a product of one scale per token, and output, [1, N]."""
    y = torch._scaled_mm(x.data, weight.t(), scale_a=x.scale.t(), scale_b=scale, out_dtype=torch.bfloat16)
    assert isinstance(y, torch.Tensor)
    return y


def by_block(x: QuantizedTokens, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return a product of one scale per token and 128 inputs, and per 128 x 128 of the weight, [C', R]."""
    from torch.nn.functional import ScalingType, scaled_mm  # since torch 2.10

    return scaled_mm(
        x.data,
        weight.t(),
        x.scale.t(),
        ScalingType.BlockWise1x128,
        scale,
        ScalingType.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )


def prepared(product: Product, scale: torch.Tensor) -> torch.Tensor:
    """Return a weight's scale, [R, C], as a product reads it: rows of blocks are padded to a multiple of 4."""
    if product is by_output:
        return scale.t().contiguous()
    return torch.nn.functional.pad(scale, (0, -scale.shape[1] % 4)).t()


def library_product(weight: Weight, device: torch.device) -> Product | None:
    """Return how the library multiplies a weight in 8 bits; None: it does not."""
    if device.type != "cuda" or weight.num_inputs % 16 or weight.num_outputs % 16:
        return None
    if weight.block[1] >= weight.num_inputs:
        return _tried(by_output, 1, 512, device)
    if weight.block != (BLOCK, BLOCK) or weight.num_inputs % BLOCK or weight.num_outputs % BLOCK:
        return None
    is_padded = weight.num_inputs // BLOCK % 4 > 0
    return _tried(by_block, BLOCK, 768 if is_padded else 512, device)


@functools.cache
def _tried(product: Product, block: int, num_inputs: int, device: torch.device) -> Product | None:
    """Return a product that yields what it should; None if it does not."""
    num_rows, num_outputs = 98, 256
    blocks = num_inputs // block if block > 1 else 1
    x_scale = torch.rand(blocks, 100, device=device)
    data = torch.ones(100, num_inputs, device=device).to(torch.float8_e4m3fn)
    weight = torch.ones(num_outputs, num_inputs, device=device).to(torch.float8_e4m3fn)
    scale = torch.rand(num_outputs // block, blocks, device=device)
    expected = (x_scale.double().t() @ scale.double().t() * (num_inputs // blocks)).repeat_interleave(block, 1)
    try:
        y = product(QuantizedTokens(data, x_scale, num_rows), weight, prepared(product, scale))
        torch.testing.assert_close(y.double(), expected, rtol=2e-2, atol=1e-2)
    except (
        AssertionError,
        AttributeError,
        ImportError,
        NotImplementedError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        _LOG.info("own kernels multiply many rows in 8 bits, not %s: %s", product.__name__, error)
        return None
    return product

"""The arithmetic of the GPU's kernels in plain torch: what is rounded there is rounded here, products are in float32.

16 bits   between operations; x before a product
FP8       x has 8 bits, too, with scales per token or per token and 128 inputs, from as many rows on as the kernels do
INT4      weights are exact, but of so many rows that the library multiplies: they are rounded to 16 bits there
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from raypp.ops.backend import ExpertWeights, Router
from raypp.ops.cpu.torch_kernels import RMSNorm, TorchChosenExperts, TorchExperts, TorchKernels
from raypp.ops.cuda.experts import ExpertShape, choose_cut
from raypp.ops.cuda.kernel_launch import Device
from raypp.ops.cuda.product_tuning import most_exact_rows_of_fp8
from raypp.ops.cuda.projection import Product
from raypp.ops.cuda.quantized_projection import MAX_OWN_ROWS_OF_INT4
from raypp.ops.cuda.router_kernels import SCALED
from raypp.ops.weight import Weight

_ANY_ROWS = 1 << 30


class PlainArithmetic(TorchKernels):
    """See `raypp.ops.backend.KernelSet`.

    Args:
        dtype: Of activations.
        device: Whose kernels are followed.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, packs_weights=False)
        self._device = Device.of(device)

    def linear(self, weight: Weight, bias: torch.Tensor | None = None) -> PlainLinear:
        """Return x -> x W^T + b."""
        matrix = weight.dequantized(torch.float32)
        if weight.kind == "fp8":
            return PlainLinear(matrix, bias, weight.block[1], most_exact_rows_of_fp8(Product(weight)))
        return PlainLinear(matrix, bias, most_exact_rows=MAX_OWN_ROWS_OF_INT4 if weight.kind == "int4" else _ANY_ROWS)

    def experts(
        self,
        norm_weight: torch.Tensor,
        eps: float,
        router: Router,
        weights: ExpertWeights,
    ) -> PlainExperts:
        """Return the sparse MLP of a layer. Where kernels take tiles of tokens, these have 8 bits before FP8."""
        gate_up, down = weights.gate_up, weights.down
        assert weights.gate_up_bias is None
        norm, kinds = RMSNorm(norm_weight, eps), (gate_up.kind, down.kind)
        of_router = None if router.norm_weight is None else RMSNorm(router.norm_weight, eps)
        matrices = [weight.dequantized(torch.float32).unbind() for weight in (gate_up, down)]

        def built(blocks: list[int]) -> TorchExperts:
            both = [
                [PlainLinear(matrix, None, block, 0 if block else _ANY_ROWS) for matrix in of_weight]
                for of_weight, block in zip(matrices, blocks, strict=True)
            ]
            return TorchExperts(norm, router, TorchChosenExperts(*both, weights.gate, weights.first), of_router)

        num_chosen = router.routing.num_chosen
        shape = ExpertShape(down.num_outputs, down.num_inputs, len(down.data), num_chosen, kinds)
        in_tiles = [SCALED if kind == "fp8" else 0 for kind in kinds]
        return PlainExperts(built([0, 0]), built(in_tiles), shape, self._device)


class PlainLinear:
    """y = x W^T + b, in float32, rounded once.

    Args:
        matrix: [N, K] float32.
        bias: [N] or None.
        block: Inputs of a token in 8 bits that share a scale; 0: x stays as it is.
        most_exact_rows: Up to how many rows the weight, or with a block x, is not rounded.
    """

    def __init__(
        self, matrix: torch.Tensor, bias: torch.Tensor | None, block: int = 0, most_exact_rows: int = _ANY_ROWS
    ) -> None:
        self._matrix = matrix
        self._bias = None if bias is None else bias.float()
        self._block = block
        self._most_exact_rows = most_exact_rows

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return y [T, N]. Shapes: x [T, K]."""
        read, matrix = x.float(), self._matrix
        if len(x) > self._most_exact_rows:
            read, matrix = (in_8_bits(read, self._block), matrix) if self._block else (read, matrix.to(x.dtype).float())
        return F.linear(read, matrix, self._bias).to(x.dtype)

    def in_float32(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return y in float32."""
        y = F.linear(x.float(), self._matrix)
        return y if out is None else out.copy_(y)


class PlainExperts:
    """A sparse MLP that reads its tokens as they are where kernels multiply few pairs, else as `in_tiles` does."""

    def __init__(self, few: TorchExperts, in_tiles: TorchExperts, shape: ExpertShape, device: Device) -> None:
        self._few = few
        self._in_tiles = in_tiles
        self._shape = shape
        self._device = device

    def __call__(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return the residual stream after the MLP, [T, H]."""
        cut = choose_cut(len(hidden), self._shape, self._device)
        return (self._in_tiles if cut.tile_rows else self._few)(hidden, residual)


def in_8_bits(x: torch.Tensor, block: int) -> torch.Tensor:
    """Return x [T, K], float32, rounded to float8_e4m3fn with a scale per token and block of inputs."""
    size = x.shape[1]
    blocks = F.pad(x, (0, -size % min(block, size))).unflatten(1, (-1, min(block, size)))
    scale = (blocks.abs().amax(2, keepdim=True) / 448).clamp(min=1e-30)
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).flatten(1)[:, :size]

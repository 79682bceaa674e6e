"""The kernel set of an NVIDIA GPU: Triton kernels where fusion pays, FlashInfer for prefill, cuBLAS for many rows."""

from __future__ import annotations

import functools
import logging
from copy import copy
from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812

from raypp.members import Members
from raypp.ops.attention import AttentionBatch, Heads, HeadsKind, LatentHeads, Rotation
from raypp.ops.backend import (
    SILU,
    AddedProjection,
    Experts,
    ExpertWeights,
    Gate,
    JoinedProjection,
    LMHead,
    Projection,
    Router,
)
from raypp.ops.cuda.between_products import join_norms, narrow, rms_norm, silu_and_mul
from raypp.ops.cuda.experts import CudaChosenExperts, CudaExperts
from raypp.ops.cuda.gated_delta import CudaGatedDelta, ScanPlan, plan_scan
from raypp.ops.cuda.heads import rotation_table
from raypp.ops.cuda.kernel_launch import Device, Workspace
from raypp.ops.cuda.latent_attention import CudaLatentAttention, LatentLayerAttention
from raypp.ops.cuda.member_sums import PushedSums
from raypp.ops.cuda.product_tuning import MAX_ROWS, OwnProduct, input_type_in_8_bits, own_product
from raypp.ops.cuda.projection import Product, fold_norm, partial_floats, project
from raypp.ops.cuda.quantized_projection import (
    Fp8Projection,
    Int4Projection,
    QuantizedProjection,
    has_kernel,
)
from raypp.ops.cuda.step_attention import CudaAttention, PrefillSpace
from raypp.ops.cuda.token_quantization import TokenNorm
from raypp.ops.kv_cache import LayerCache
from raypp.ops.row_state import DeltaHeads
from raypp.ops.weight import Weight, linear_in_float32, rounded_to_8_bits

ALL_ROWS = 1 << 30
"""More rows than any step has."""

_LOG = logging.getLogger(__name__)


class CudaKernels:
    """See `raypp.ops.backend.KernelSet`.

    Args:
        device: A CUDA device.
        dtype: bfloat16 or float16.
        block_size: Of the KV cache.
        max_query_len: The most query tokens of a decode row, 1 + K.
        num_ring_entries: Steps whose attention may be planned at a time.
        kv_dtype: Of the KV cache; None: as `dtype`.
        is_invariant: Whether the bits of a row must not depend on the rows beside it.
    """

    can_be_recorded = True

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        *,
        block_size: int,
        max_query_len: int,
        num_ring_entries: int,
        kv_dtype: torch.dtype | None = None,
        is_invariant: bool = False,
    ) -> None:
        self._device = Device.of(device, is_invariant=is_invariant)
        self._dtype = dtype
        self._workspace = Workspace(device)
        self._kv_dtype = kv_dtype or dtype
        self._block_size = block_size
        self._max_query_len = max_query_len
        self._num_ring_entries = num_ring_entries
        # Copies share both.
        self._attention: dict[HeadsKind, CudaAttention | CudaLatentAttention] = {}
        self._space: list[PrefillSpace] = []  # empty, or what kinds of attention share
        self._has_states = False
        self._most_own_rows = 0
        self._has_8_bits = False

    def in_8_bits(self) -> CudaKernels:
        """Return a set whose own kernels read weights of 8 bits. What drafts are changes no text."""
        kernels = copy(self)
        kernels._has_8_bits = True
        kernels._device = replace(self._device, is_invariant=False)
        return kernels

    @property
    def library_from_tokens(self) -> int:
        """One more than the most rows that own kernels ever multiply."""
        return 1 + self._most_own_rows

    def norm_linear(
        self,
        norm_weight: torch.Tensor,
        eps: float,
        weight: Weight,
        bias: torch.Tensor | None = None,
    ) -> Projection:
        if self._has_kernel(weight):
            return self._quantized(weight, bias, TokenNorm(norm_weight, eps))
        matrix = weight.dequantized(self._dtype)
        fold_norm(matrix, norm_weight)
        return self._projection(Product(Weight(matrix), bias, eps))

    def norm(self, weight: torch.Tensor, eps: float) -> Projection:
        device = self._device

        def norm(x: torch.Tensor) -> torch.Tensor:
            if torch.compiler.is_compiling():
                return plain_rms_norm(x, weight, eps)
            return rms_norm(x, weight, eps, device)

        return norm

    def joined_norms_linear(
        self,
        embedding: torch.Tensor,
        norm_weights: tuple[torch.Tensor, torch.Tensor],
        eps: float,
        weight: Weight,
        bias: torch.Tensor | None = None,
    ) -> JoinedProjection:
        matrix = weight.dequantized(self._dtype)
        for columns, norm_weight in zip(matrix.chunk(2, 1), norm_weights, strict=True):
            fold_norm(columns, norm_weight)
        projection, device = self._projection(Product(Weight(matrix), bias)), self._device

        def joined(token_ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
            dtype = projection.input_type(len(states), is_normed=True)
            return projection(join_norms(embedding, token_ids, states, eps, device, dtype))

        return joined

    def linear(self, weight: Weight, bias: torch.Tensor | None = None) -> Projection:
        if self._has_kernel(weight):
            return self._quantized(weight, bias, None)
        return self._projection(Product(Weight(weight.dequantized(self._dtype)), bias))

    def norm_gated_linear(
        self,
        norm_weight: torch.Tensor,
        eps: float,
        weight: Weight,
        bias: torch.Tensor | None = None,
        gate: Gate = SILU,
    ) -> Projection:
        if gate != SILU:
            projection = self.norm_linear(norm_weight, eps, weight, bias)
            return lambda x: gate(*projection(x).chunk(2, -1))
        if self._has_kernel(weight):
            return self._quantized(weight, bias, TokenNorm(norm_weight, eps), is_gated=True)
        matrix = weight.dequantized(self._dtype)
        fold_norm(matrix, norm_weight)
        return self._projection(Product(Weight(matrix), bias, eps, is_gated=True))

    def add_linear(
        self, weight: Weight, bias: torch.Tensor | None = None, norm: tuple[torch.Tensor, float] | None = None
    ) -> AddedProjection:
        if norm is not None:
            projection, normed = self.linear(weight, bias), self.norm(*norm)
            return lambda x, residual: residual.add_(normed(projection(x)))
        if self._has_kernel(weight):
            return self._quantized(weight, bias, None).add
        return self._projection(Product(Weight(weight.dequantized(self._dtype)), bias)).add

    def member_sum(self, members: Members) -> PushedSums:
        return PushedSums(members, self._device)

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def experts(self, norm_weight: torch.Tensor, eps: float, router: Router, weights: ExpertWeights) -> Experts:
        router = replace(router, weight=router.weight.to(self._dtype))
        return CudaExperts(norm_weight, eps, router, weights, self._device, self._workspace)

    def chosen_experts(self, weights: ExpertWeights) -> CudaChosenExperts:
        return CudaChosenExperts(weights, self._dtype, self._device, self._workspace)

    def lm_head(
        self,
        weight: Weight,
        norm_weight: torch.Tensor | None = None,
        eps: float = 0.0,
        *,
        is_shared: bool = False,
    ) -> LMHead:
        matrix = weight.dequantized(self._dtype)
        # Folded or not, the norm's weight is rounded otherwise: whether a draft head shares this one must not matter.
        if norm_weight is None or is_shared or self._device.is_invariant:
            head = self._projection(Product(Weight(matrix)), is_float32=True)
            if norm_weight is None:
                return head
            norm = self.norm(norm_weight, eps)  # its weight cannot be folded into one that others use as well
            return lambda x, out=None: head(norm(x), out)
        fold_norm(matrix, norm_weight)
        return self._projection(Product(Weight(matrix), norm_eps=eps), is_float32=True)

    def attention(self, heads: Heads) -> LayerAttention:
        if heads.kind not in self._attention:
            self._attention[heads.kind] = CudaAttention(
                heads,
                block_size=self._block_size,
                dtype=self._dtype,
                kv_dtype=self._kv_dtype,
                max_query_len=self._max_query_len,
                num_ring_entries=self._num_ring_entries,
                device=self._device,
                workspace=self._workspace,
                space=self._prefill_space,
            )
        attention = self._attention[heads.kind]
        assert isinstance(attention, CudaAttention)
        return LayerAttention(attention, heads, self._has_8_bits)

    def latent_attention(self, latents: LatentHeads) -> LatentLayerAttention:
        kind = latents.heads.kind
        if kind not in self._attention:
            self._attention[kind] = CudaLatentAttention(
                latents,
                block_size=self._block_size,
                dtype=self._dtype,
                max_query_len=self._max_query_len,
                num_ring_entries=self._num_ring_entries,
                device=self._device,
                workspace=self._workspace,
                space=self._prefill_space,
            )
        attention = self._attention[kind]
        assert isinstance(attention, CudaLatentAttention)
        return LatentLayerAttention(attention, latents)

    def gated_delta(self, heads: DeltaHeads) -> CudaGatedDelta:
        self._has_states = True
        return CudaGatedDelta(heads, block_size=self._block_size, device=self._device)

    def _prefill_space(self) -> PrefillSpace:
        if not self._space:
            self._space.append(PrefillSpace(self._device.torch_device))
        return self._space[0]

    def rotation(self, positions: torch.Tensor, inverse_frequencies: torch.Tensor, scale: float = 1.0) -> Rotation:
        """Return the step's rotation, float32."""
        return rotation_table(positions, inverse_frequencies, self._device, scale)

    def rotation_of(self, cos: torch.Tensor, sin: torch.Tensor) -> Rotation:
        return Rotation(cos.float().contiguous(), sin.float().contiguous())

    def plan_attention(self, batch: AttentionBatch, ring_entry: int) -> None:
        assert self._attention or self._has_states, "no layer has been made"
        batch.plans = {}
        if batch.prefill_query_lens:
            for attention in self._attention.values():
                attention.plan(batch, ring_entry)
            if self._has_states:
                batch.plans[ScanPlan] = plan_scan(batch, self._block_size, self._device.torch_device)

    def _has_kernel(self, weight: Weight) -> bool:
        """Whether a quantized weight is multiplied as it is; others are dequantized."""
        if weight.kind == "plain" or self._has_8_bits:  # a head's inputs have other types
            return False
        if has_kernel(weight) and (weight.kind in ("int4", "fp4") or self._device.has_fp8):
            return True
        _log_dequantized(weight.kind, weight.block)
        return False

    def _quantized(
        self, weight: Weight, bias: torch.Tensor | None, norm: TokenNorm | None, *, is_gated: bool = False
    ) -> QuantizedProjection:
        self._most_own_rows = ALL_ROWS
        make = Fp8Projection if weight.kind == "fp8" else Int4Projection
        return make(weight, bias, norm, self._device, self._workspace, is_gated=is_gated)

    def _projection(self, product: Product, *, is_float32: bool = False) -> CudaProjection:
        rounded = replace(product, weight=rounded_to_8_bits(product.weight.data)) if self._has_8_bits else None
        projection = CudaProjection(product, self._device, self._workspace, rounded, is_float32=is_float32)
        self._most_own_rows = max(self._most_own_rows, projection.most_own_rows)
        return projection


@functools.cache
def _log_dequantized(kind: str, block: tuple[int, int]) -> None:
    _LOG.warning("this device has no kernel for %s weights with a scale per %d x %d: they become 16 bits", kind, *block)


class LayerAttention:
    """One layer's view of the attention that layers of its kind share."""

    def __init__(self, attention: CudaAttention, heads: Heads, is_before_8_bits: bool) -> None:
        self._attention = attention
        self._heads = heads
        self._is_before_8_bits = is_before_8_bits

    def __call__(
        self,
        qkv: torch.Tensor,
        rope: Rotation,
        cache: LayerCache,
        batch: AttentionBatch,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        narrows = self._is_before_8_bits and not self._heads.has_gate  # a gate is multiplied in 16 bits
        dtype = input_type_in_8_bits(len(qkv)) if narrows else None
        return self._attention.run(qkv, self._heads, rope, cache, batch, out, dtype)

    def append(self, qkv: torch.Tensor, rope: Rotation, cache: LayerCache, slot_mapping: torch.Tensor) -> None:
        self._attention.append(qkv, self._heads, rope, cache, slot_mapping)


class CudaProjection:
    """A product with its norm before it and its gate or sum after it: by own kernels for few rows, else by the library.

    While torch.compile traces it, it is the library's product with plain torch around, which the compiler can fuse.

    Args:
        product: What it computes.
        device: Where it runs.
        workspace: For products that are split.
        in_8_bits: The same in 8 bits, for own kernels; None: they read `product`.
        is_float32: Whether the result is float32, for products without bias or gate; else it has the weight's type.
    """

    def __init__(
        self,
        product: Product,
        device: Device,
        workspace: Workspace,
        in_8_bits: Product | None = None,
        *,
        is_float32: bool = False,
    ) -> None:
        self._product = product
        self._device = device
        self._workspace = workspace
        self._is_in_8_bits = in_8_bits is not None
        self._is_float32 = is_float32
        self._own: dict[int, OwnProduct] = {}
        for num_rows in range(1, MAX_ROWS + 1):
            own = own_product(num_rows, in_8_bits or product, device)
            if own is not None:
                self._own[num_rows] = own
                workspace.reserve(partial_floats(num_rows, own.product, own.tuning))

    @property
    def most_own_rows(self) -> int:
        """The most rows for which an own kernel is chosen; 0 if the library takes all."""
        return ALL_ROWS if self._device.is_invariant else max(self._own, default=0)

    def _own_product(self, num_rows: int) -> OwnProduct | None:
        if num_rows not in self._own and self._device.is_invariant:
            own = own_product(num_rows, self._product, self._device)
            assert own is not None
            self._own[num_rows] = own
        return self._own.get(num_rows)

    def input_type(self, num_rows: int, *, is_normed: bool) -> torch.dtype:
        """Return the type that the inputs of so many rows should have."""
        dtype = input_type_in_8_bits(num_rows, is_normed=is_normed) if self._is_in_8_bits else None
        return dtype or self._product.weight.data.dtype

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return norm(x) W^T + b, or its gate, [T, N]; in `out`, float32, if that is given.

        Shapes: x [T, K] contiguous.
        """
        if torch.compiler.is_compiling():
            return self._plain(x)
        product, own, num_rows = self._product, self._own_product(len(x)), len(x)
        if product.norm_eps is not None and (own is None or own.product.norm_eps is None):
            x = rms_norm(x, None, product.norm_eps, self._device, self.input_type(num_rows, is_normed=True))
        if own is not None:
            return self._project(own, x, None, self._output_type(num_rows), out)
        x = x.to(product.weight.data.dtype)
        if self._is_float32:
            return linear_in_float32(x, product.weight.data, out)
        y = F.linear(x, product.weight.data, product.bias)
        return silu_and_mul(y, self._device) if product.is_gated else y

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return residual + x W^T + b, [T, N]. Shapes: x [T, K] contiguous; residual [T, N], may be overwritten."""
        product = self._product
        if torch.compiler.is_compiling():
            return residual + F.linear(x, product.weight.data, product.bias)
        own = self._own_product(len(x))
        if own is not None:
            return self._project(own, x, residual, residual.dtype)
        # The library adds in the product's own kernel.
        residual = residual.addmm_(x.to(residual.dtype), product.weight.data.t())
        return residual if product.bias is None else residual.add_(product.bias)

    def _output_type(self, num_rows: int) -> torch.dtype:
        if self._product.is_gated:  # the next product has as many rows, and is in 8 bits if this one is
            return self.input_type(num_rows, is_normed=False)
        return torch.float32 if self._is_float32 else self._product.weight.data.dtype

    def _project(
        self,
        own: OwnProduct,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        dtype: torch.dtype,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        read_as = self.input_type(len(x), is_normed=False)
        if read_as.itemsize == 1 < x.element_size():
            x = narrow(x, read_as, self._device)
        return project(x, own.product, residual, own.tuning, self._device, self._workspace, dtype, out)

    def _plain(self, x: torch.Tensor) -> torch.Tensor:
        product = self._product
        assert not self._is_float32, "an LM head is never compiled"
        if product.norm_eps is not None:
            x = plain_rms_norm(x, None, product.norm_eps)
        y = F.linear(x, product.weight.data, product.bias)
        return plain_silu_and_mul(y) if product.is_gated else y


def plain_rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Return x [..., n] scaled to a root mean square of one, times weight [..., n] if there is one, in float32.

    For torch.compile, and to compare kernels with.
    """
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight.float()).to(x.dtype)


def plain_silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up [T, I] of gate_up [T, 2 * I]; computed in float32."""
    gate, up = gate_up.float().chunk(2, -1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)

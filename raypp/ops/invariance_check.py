"""A check at start that a token has the same bits alone and among others, operation by operation (`batch_invariant`).

Products, norms and experts see rows alone and in other numbers, places and company. Attention sees a row as one prompt,
as two chunks of one, and as decode rows, alone and among others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch

from raypp.errors import ConfigError
from raypp.ops.attention import AttentionBatch, Heads
from raypp.ops.backend import (
    SILU,
    AddedProjection,
    Attention,
    Experts,
    ExpertWeights,
    Gate,
    KernelSet,
    LMHead,
    Projection,
    Router,
)
from raypp.ops.kv_cache import LayerCache, allocate_layer_cache
from raypp.ops.weight import Weight

RowsOperation = Callable[[torch.Tensor], torch.Tensor]
"""From [T, K] to [T, N], each row by itself. It may overwrite what it is given."""

_Operation = TypeVar("_Operation", bound=RowsOperation)

_MOST_ROWS, _MOST_BYTES = 2200, 256 << 20  # of a result
_PARTS = tuple(slice(*ends) for ends in ((0, 1), (1, 2), (2, 9), (5, 29), (3, 36), (17, 82), (40, 240), (1, 900)))
_LENGTH, _CHUNK = 5300, 1300  # tokens of a row, and of its first chunk
_DECODE_LENGTHS = (_LENGTH, _LENGTH - 1, 4097, 700, 257, 256, 3) * 10
_QUERY_LENS = (1, 3)  # tokens of a decode row, drafts included
_MAX_GROUPS = 64  # of layers with block tables of their own


def compare_rows(name: str, operation: RowsOperation, x: torch.Tensor) -> None:
    """Compare what an operation gives for some rows and for all.

    Args:
        name: Of the operation.
        operation: What is compared.
        x: [T, K], left as it is.

    Raises:
        ConfigError: names the operation, whose bits differ.
    """
    together = operation(x.clone())
    for part in _PARTS:
        if not torch.equal(operation(x[part].clone()), together[part]):
            _refuse(name, f"rows {part.start} to {min(part.stop, len(x)) - 1} differ alone and among {len(x)}")


class InvarianceCheck:
    """A kernel set that remembers one operation of each shape that is made with it.

    Args:
        kernels: Makes them.
        device: Where they run.
        dtype: Of activations.
        kv_dtype: Of the KV cache.
        block_size: Of the KV cache.
    """

    def __init__(
        self, kernels: KernelSet, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, block_size: int
    ) -> None:
        self._kernels = kernels
        self._device = device
        self._dtype = dtype
        self._kv_dtype = kv_dtype
        self._block_size = block_size
        self._operations: dict[str, tuple[RowsOperation, int]] = {}
        self._attention: dict[str, tuple[Attention, Heads]] = {}

    @property
    def as_kernels(self) -> KernelSet:
        """Itself."""
        return cast(KernelSet, self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def norm_linear(
        self, norm_weight: torch.Tensor, eps: float, weight: Weight, bias: torch.Tensor | None = None
    ) -> Projection:
        name = _named("norm and product", weight)
        return self._taken(name, self._kernels.norm_linear(norm_weight, eps, weight, bias), weight.num_inputs)

    def norm(self, weight: torch.Tensor, eps: float) -> Projection:
        return self._taken(f"norm of {len(weight)}", self._kernels.norm(weight, eps), len(weight))

    def linear(self, weight: Weight, bias: torch.Tensor | None = None) -> Projection:
        return self._taken(_named("product", weight), self._kernels.linear(weight, bias), weight.num_inputs)

    def norm_gated_linear(
        self,
        norm_weight: torch.Tensor,
        eps: float,
        weight: Weight,
        bias: torch.Tensor | None = None,
        gate: Gate = SILU,
    ) -> Projection:
        made = self._kernels.norm_gated_linear(norm_weight, eps, weight, bias, gate)
        return self._taken(_named("norm, product and gate", weight), made, weight.num_inputs)

    def add_linear(
        self, weight: Weight, bias: torch.Tensor | None = None, norm: tuple[torch.Tensor, float] | None = None
    ) -> AddedProjection:
        num_inputs, num_outputs = weight.num_inputs, weight.num_outputs
        name, made = _named("product and sum", weight), self._kernels.add_linear(weight, bias, norm)
        num_copies = -(-num_outputs // num_inputs)
        self._taken(name, lambda x: made(x, x.repeat(1, num_copies)[:, :num_outputs].contiguous()), num_inputs)
        return made

    def experts(self, norm_weight: torch.Tensor, eps: float, router: Router, weights: ExpertWeights) -> Experts:
        made = self._kernels.experts(norm_weight, eps, router, weights)
        self._taken(_named(f"{len(router.weight)} experts", weights.gate_up), made, len(norm_weight))
        return made

    def lm_head(
        self,
        weight: Weight,
        norm_weight: torch.Tensor | None = None,
        eps: float = 0.0,
        *,
        is_shared: bool = False,
    ) -> LMHead:
        num_inputs, name = weight.num_inputs, _named("LM head", weight)
        made = self._kernels.lm_head(weight, norm_weight, eps, is_shared=is_shared)
        self._taken(name, made, num_inputs)
        return made

    def attention(self, heads: Heads) -> Attention:
        made = self._kernels.attention(heads)
        kind = f"{heads.num_heads} query heads and {heads.num_kv_heads} KV heads of {heads.head_dim}"
        self._attention.setdefault(f"attention of {kind}, window {heads.window}", (made, heads))
        return made

    def run(self) -> None:
        """Compare what each operation gives, and forget them.

        Raises:
            ConfigError: names the first one whose bits differ.
        """
        generator = torch.Generator(self._device).manual_seed(0)
        for name, (operation, num_inputs) in self._operations.items():
            x = torch.randn(_MOST_ROWS, num_inputs, generator=generator, device=self._device).to(self._dtype)
            num_outputs = operation(x[:3].clone()).shape[1]
            compare_rows(name, operation, x[: max(3, _MOST_BYTES // (4 * num_outputs))])
        for name, (attention, heads) in self._attention.items():
            self._compare_attention(name, attention, heads, generator)
        self._operations.clear()
        self._attention.clear()

    def _taken(self, name: str, operation: _Operation, num_inputs: int) -> _Operation:
        self._operations.setdefault(name, (operation, num_inputs))
        return operation

    def _compare_attention(self, name: str, attention: Attention, heads: Heads, generator: torch.Generator) -> None:
        num_blocks = -(-_LENGTH // self._block_size)
        table = 1 + torch.randperm(num_blocks, generator=generator, device=self._device).to(torch.int32)
        sizes = heads.num_kv_heads, heads.head_dim, heads.value_dim
        qkv = torch.randn(_LENGTH, heads.width, generator=generator, device=self._device).to(self._dtype)
        frequencies = torch.logspace(0, -4, (heads.rotary_dim or heads.head_dim) // 2, device=self._device)

        def attend(cache: LayerCache, positions: Sequence[int], num_decode_rows: int, query_len: int) -> torch.Tensor:
            """Return the output of tokens of the row: of decode rows of so many tokens each, or of a chunk."""
            at = torch.tensor(positions, device=self._device)
            num_rows = num_decode_rows or 1
            lengths = at.view(num_rows, -1)[:, -1] + 1
            batch = AttentionBatch(
                num_decode_rows=num_decode_rows,
                decode_query_len=query_len,
                seq_lens=lengths.to(torch.int32),
                block_tables=[table.expand(num_rows, -1).contiguous()] * _MAX_GROUPS,
                slot_mappings=[table[at // self._block_size].long() * self._block_size + at % self._block_size]
                * _MAX_GROUPS,
                prefill_query_lens=[] if num_decode_rows else [len(positions)],
                prefill_seq_lens=[] if num_decode_rows else [positions[-1] + 1],
            )
            self._kernels.plan_attention(batch, 0)
            return attention(qkv[at], self._kernels.rotation(at, frequencies), cache, batch)

        caches = [
            allocate_layer_cache(1 + num_blocks, self._block_size, *sizes, self._kv_dtype, self._device)
            for _ in range(2)
        ]
        whole = attend(caches[0], range(_LENGTH), 0, 1)
        chunks = [attend(caches[1], range(*ends), 0, 1) for ends in ((0, _CHUNK), (_CHUNK, _LENGTH))]
        if not torch.equal(torch.cat(chunks), whole):
            _refuse(name, f"a prompt of {_LENGTH} tokens differs in chunks of {_CHUNK} and {_LENGTH - _CHUNK}")
        for lengths in (_DECODE_LENGTHS[:1], _DECODE_LENGTHS):
            for query_len in _QUERY_LENS:
                positions = [length - query_len + index for length in lengths for index in range(query_len)]
                if not torch.equal(attend(caches[1], positions, len(lengths), query_len), whole[positions]):
                    _refuse(name, f"tokens differ as {len(lengths)} decode rows of {query_len} and in a prompt")


def _named(operation: str, weight: Weight) -> str:
    return f"{operation} of {weight.num_inputs} inputs and {weight.num_outputs} outputs, {weight.kind}"


def _refuse(name: str, difference: str) -> None:
    raise ConfigError(
        "batch_invariant does not hold here: an operation gives a row other bits beside other rows",
        got=f"{name}: {difference}",
        expected="the same bits",
        hint="batch_invariant=false, and please report it with the GPU's name and the versions of torch and Triton",
    )

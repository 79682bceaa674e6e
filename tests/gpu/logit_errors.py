"""How far a model's logits are from float32 of the same weights: by the GPU's kernels, and by plain torch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from memory_checkpoints import random_checkpoint
from plain_arithmetic import PlainArithmetic

from raypp.models.config import ModelConfig
from raypp.models.decoder import DecoderModel
from raypp.ops.attention import AttentionBatch
from raypp.ops.backend import KernelSet
from raypp.ops.cpu.torch_kernels import TorchKernels
from raypp.ops.cuda.cuda_kernels import CudaKernels
from raypp.ops.kv_cache import LayerCache, allocate_layer_cache, sides

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Errors:
    """Root mean squares over all logits of some steps, as a share of the root mean square of the exact ones."""

    kernels: float
    plain: float
    between: float  # of the difference between the two

    @property
    def ratio(self) -> float:
        """Of the kernels' to plain torch's."""
        return self.kernels / self.plain


@dataclass(frozen=True, eq=False)
class Step:
    """Decode rows with some context, and prompts behind them."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: list[int]
    num_decode_rows: int
    prompt_lens: list[int]
    caches: list[LayerCache]  # as they are before the step

    def batch(self) -> AttentionBatch:
        """Return the step as attention sees it."""
        return AttentionBatch(
            num_decode_rows=self.num_decode_rows,
            decode_query_len=1,
            seq_lens=torch.tensor(self.seq_lens, dtype=torch.int32, device=self.token_ids.device),
            block_tables=[self.block_tables],
            slot_mappings=[self.slot_mapping],
            prefill_query_lens=self.prompt_lens,
            prefill_seq_lens=self.seq_lens[self.num_decode_rows :],
        )


class ThreeModels:
    """The same random weights in three models: the GPU's kernels, plain torch, and exact.

    Args:
        config: The model.
        dtype: Of the first two; the third is in float32.
        device: Of all.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        checkpoint = random_checkpoint(config, dtype, device)

        def built(kernels: KernelSet, dtype: torch.dtype) -> DecoderModel:
            layers = {"start_layer": 0, "end_layer": config.num_layers}
            model = DecoderModel(config, **layers, dtype=dtype, device=device, kernels=kernels)
            model.load_weights(checkpoint)
            return model

        kernels = CudaKernels(device, dtype, block_size=BLOCK_SIZE, max_query_len=1, num_ring_entries=1)
        self._config = config
        self._dtype = dtype
        self._device = device
        self._by_kernels = built(kernels, dtype)
        self._plain = built(PlainArithmetic(dtype, device), dtype)
        self._exact = built(TorchKernels(torch.float32, packs_weights=False), torch.float32)

    def step(self, num_rows: int, prompt_lens: Sequence[int], seed: int, max_context: int = 64) -> Step:
        """Return a step of random tokens; contexts of decode rows are random keys and values."""
        rng, config = random.Random(seed), self._config
        generator = torch.Generator(self._device).manual_seed(seed)
        query_lens = [1] * num_rows + list(prompt_lens)
        seq_lens = [rng.randint(1, max_context) for _ in range(num_rows)] + list(prompt_lens)
        width = -(-max(seq_lens) // BLOCK_SIZE)
        blocks = rng.sample(range(1, 1 + width * len(seq_lens)), width * len(seq_lens))
        tables = [blocks[row * width :][:width] for row in range(len(seq_lens))]
        positions = [
            (row, position)
            for row, (count, length) in enumerate(zip(query_lens, seq_lens, strict=True))
            for position in range(length - count, length)
        ]
        slots = [tables[row][at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for row, at in positions]
        attention = config.attention[0]
        sizes = 1 + len(blocks), BLOCK_SIZE, attention.num_kv_heads, attention.head_dim, attention.v_dim
        caches = [allocate_layer_cache(*sizes, self._dtype, self._device) for _ in range(config.num_layers)]
        for side in sides(caches):
            side.copy_(torch.randn(side.shape, generator=generator, device=self._device))
        ids = [rng.randrange(config.vocab_size) for _ in positions]

        def on_device(values: Sequence[object], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=self._device)

        return Step(
            on_device(ids, torch.int32),
            on_device([position for _, position in positions], torch.int64),
            on_device(slots, torch.int64),
            on_device(tables, torch.int32),
            seq_lens,
            num_rows,
            list(prompt_lens),
            caches,
        )

    @torch.inference_mode()
    def errors(self, steps: Sequence[Step]) -> Errors:
        """Return how far the first two models are from the third, and from each other."""
        sums = torch.zeros(4, dtype=torch.float64)
        for step in steps:
            kernels, plain, exact = (_logits(model, step) for model in (self._by_kernels, self._plain, self._exact))
            assert exact.isfinite().all()
            parts = kernels - exact, plain - exact, kernels - plain, exact
            sums += torch.stack([part.double().square().sum().cpu() for part in parts])
        return Errors(*(sums[:3] / sums[3]).sqrt().tolist())


def _logits(model: DecoderModel, step: Step) -> torch.Tensor:
    """Return the logits of all tokens of a step, [T, V] float32."""
    batch = step.batch()
    model.plan_attention(batch, 0)
    caches = [LayerCache(*(side.to(model.dtype, copy=True) for side in cache)) for cache in step.caches]
    return model.compute_logits(model.forward(model.embed(step.token_ids), step.positions, batch, caches))

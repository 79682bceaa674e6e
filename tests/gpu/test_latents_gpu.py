"""Attention over latents on a GPU: decode and prefill rows, all cuts, captured steps, at the sizes of models."""

from __future__ import annotations

import random
import sys

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from kernel_checks import Kernels
from latent_checks import check_latents, made_batch, made_latents

from raypp.ops.cuda.heads import rotation_table
from raypp.ops.cuda.latent_attention import CudaLatentAttention
from raypp.ops.cuda.latent_kernels import LatentTuning
from raypp.ops.cuda.step_attention import PrefillSpace
from raypp.ops.kv_cache import LayerCache

BF16, CUDA = torch.bfloat16, torch.device("cuda")
DEEPSEEK, MEMBER, GLM_FLASH, MISTRAL, ODD = (
    (128, 128, 64, 512, 128),
    (16, 128, 64, 512, 128),
    (20, 192, 64, 512, 256),
    (32, 64, 64, 256, 128),
    (6, 24, 8, 40, 24),
)


@pytest.mark.parametrize("sizes", [DEEPSEEK, MEMBER, GLM_FLASH, MISTRAL, ODD], ids=str)
@pytest.mark.parametrize("query_len", [1, 2, 4, 9])
@pytest.mark.parametrize("scale", [None, 0.5], ids=["16 bits", "fp8_kv"])
def test_decode(sizes, query_len, scale):
    for seed, num_rows in enumerate((1, 3, 40)):
        rng = random.Random(seed)
        lens = [rng.choice((0, query_len, rng.randint(query_len, 3000))) for _ in range(num_rows)]
        check_latents(BF16, sizes, lens, query_len, scale=scale, in_columns=seed == 1)


@pytest.mark.parametrize("tuning", [LatentTuning(1, 2), LatentTuning(7, 4, 64), LatentTuning(64, 2, 16)], ids=str)
def test_cuts(tuning):
    check_latents(BF16, DEEPSEEK, [1000, 1, 64, 129], tuning=tuning)


@pytest.mark.parametrize("sizes", [DEEPSEEK, MEMBER, GLM_FLASH, MISTRAL, ODD], ids=str)
@pytest.mark.parametrize("scale", [None, 0.5], ids=["16 bits", "fp8_kv"])
def test_prefill_beside_decode(sizes, scale, monkeypatch):
    prefill = [(700, 700), (37, 1000), (1, 40), (512, 1500)]
    check_latents(BF16, sizes, [100, 3], 1, prefill, scale=scale)
    monkeypatch.setattr("raypp.ops.expanded_rows.EXPANDED_BYTES", 8 << 20)  # some heads after the others
    check_latents(BF16, sizes, [], 1, prefill, scale=scale)


@pytest.mark.skipif("dry_report" in sys.modules, reason="what kernels compute is compared")
def test_a_captured_step_serves_other_lengths():
    kernels = Kernels(BF16)
    latents = made_latents(kernels, DEEPSEEK)
    batch, positions, num_blocks = made_batch(kernels, [900, 700, 300], 1, (), 16)
    cache = LayerCache(kernels.normal(num_blocks, 1, 16, 64), kernels.normal(num_blocks, 1, 16, 512))
    sizes = {"block_size": 16, "dtype": BF16, "max_query_len": 1, "num_ring_entries": 1}
    shared = {"device": kernels.device, "workspace": kernels.workspace, "space": lambda: PrefillSpace(CUDA)}
    attention = CudaLatentAttention(latents, **sizes, **shared)
    queries, projected = kernels.normal(3, 128 * 192), kernels.normal(3, 576)
    by = rotation_table(positions, torch.ones(32, device=CUDA), kernels.device)

    def step(queries: torch.Tensor) -> torch.Tensor:
        return attention.run((queries.clone(), projected), latents, by, cache, batch, None)

    step(queries)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step(queries)
    for lens in ([900, 700, 300], [30, 699, 1], [128, 129, 0]):
        batch.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        graph.replay()
        assert torch.equal(recorded, step(queries))

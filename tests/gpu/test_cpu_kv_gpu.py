"""KV blocks of a GPU in page-locked memory: copied as the CPU's twin copies, and the same texts with and without."""

from __future__ import annotations

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from answer_comparison import num_parted_at_ties
from eagle_reference import make_head
from hf_models import make_checkpoint
from sampling_reference import Case
from test_cpu_kv import MAX_LEN, converse, scarce

from raypp.ops.block_store import TorchBlockStore
from raypp.ops.device_kernels import open_block_store, open_row_store
from raypp.ops.kv_cache import FP8, LayerCache, allocate_layer_cache, sides
from raypp.plan.hardware import Hardware

NUM_BLOCKS, NUM_CPU_BLOCKS = 300, 500
TIE = 0.1  # of the deviation of scores


@pytest.mark.parametrize("num_staged", [1, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
def test_blocks_move_as_on_a_cpu(dtype, num_staged):
    sizes = [(2, 64, 64)] * 3 + [(1, 192, 128), (4, 512, 512)]
    on_cpu = [allocate_layer_cache(NUM_BLOCKS, 16, *each, dtype, torch.device("cpu")) for each in sizes]
    for side in sides(on_cpu):
        side.view(torch.uint8).random_(0, 255)
    on_gpu = [LayerCache(*(side.cuda() for side in cache)) for cache in on_cpu]
    stores = [TorchBlockStore(on_cpu, NUM_CPU_BLOCKS), open_block_store(on_gpu, NUM_CPU_BLOCKS, num_staged)]
    rng = np.random.default_rng(0)
    for round_number in range(6):
        count = rng.integers(1, NUM_BLOCKS)
        blocks = rng.permutation(np.arange(1, NUM_BLOCKS))[:count].astype(np.int32)
        first = int(rng.integers(0, NUM_CPU_BLOCKS - count))
        places = rng.permutation(NUM_CPU_BLOCKS)[:count] if round_number % 2 else np.arange(first, first + count)
        others = rng.permutation(blocks)
        for store in stores:
            store.copy_out(blocks, places.astype(np.int32))
            store.copy_in(others, places.astype(np.int32))
    for side, expected in zip(sides(on_gpu), sides(on_cpu), strict=True):
        assert torch.equal(side.cpu().view(torch.uint8), expected.view(torch.uint8))


def test_rows_of_tensors_move_as_on_a_cpu():
    on_cpu = [torch.arange(9, dtype=torch.int32), torch.randn(9, 33, 5), torch.randn(9, 7, 2).to(torch.bfloat16)]
    on_gpu = [table.cuda() for table in on_cpu]
    for tables in (on_cpu, on_gpu):
        store = open_row_store([table[3:] for table in tables], 4)
        store.copy_out(np.array([0, 5, 2], np.int32), np.array([3, 1, 0], np.int32))
        store.copy_in(np.array([4, 0, 1], np.int32), np.array([1, 0, 1], np.int32))
    for found, expected in zip(on_gpu, on_cpu, strict=True):
        assert torch.equal(found.cpu(), expected)


def test_memory_can_be_locked_again_when_its_owner_is_gone():
    caches = [allocate_layer_cache(8, 16, 2, 64, 64, torch.bfloat16, torch.device("cuda"))]
    for _ in range(3):
        store = open_block_store(caches, 4096, 8)
        blocks = np.arange(1, 8, dtype=np.int32)
        store.copy_out(blocks, blocks)
        torch.cuda.synchronize()
        del store


@pytest.mark.parametrize("mode", ["none", "full_and_piecewise"])
@pytest.mark.parametrize("method", [None, "ngram", "eagle3", "states"])
def test_text_does_not_depend_on_it(tmp_path, method, mode):
    # In float32 texts are those without a prefix cache's hits; bfloat16 has kernels and graphs, and rounds.
    dtype, seed = ("float32", 4) if mode == "none" else ("bfloat16", 1)
    has_states = method == "states"
    family, min_layers = ("qwen3_5", 4) if has_states else ("qwen3", 2)
    path = make_checkpoint(family, seed, tmp_path / "model", min_layers=min_layers)
    memory_bytes = torch.cuda.get_device_properties(0).total_memory
    hardware = Hardware(4, 1 << 36, 1, "this one", memory_bytes, torch.cuda.get_device_capability())
    settings = {"device": "cuda", "dtype": dtype, "mode": mode, "num_stages": 2, "stage_num_gpus": 0.5}
    if has_states:
        settings |= {"num_state_snapshots": 2, "min_prefill_chunk_tokens": 1}
    elif method is not None:
        speculative = {"method": method, "num_speculative_tokens": 2}
        head = {"model": str(make_head("eagle3", path, tmp_path / "head"))} if method == "eagle3" else {}
        settings["speculative"] = speculative | head
    settings |= {"max_model_len": MAX_LEN, "max_num_seqs": 2}
    few = scarce(settings, 0.1)
    if mode == "none":
        others = few
    else:  # steps of one request alone, whose prompts begin where the same prefixes end, round alike
        few, others = (each | {"max_num_seqs": 1} for each in (few, scarce(settings, 4.0)))
        others |= {"num_state_snapshots": 64} if has_states else {}
    asked: tuple[list[Case], list[Case]] = [], []
    without, before = converse(path, hardware, asked[0], **others)
    texts, after = converse(path, hardware, asked[1], cpu_kv_bytes=1 << 26, **few)
    assert after.num_blocks_copied_out > 0
    assert after.num_blocks_copied_in > 0
    assert (after.num_snapshots_copied_in > 0) == has_states
    if mode == "none":
        assert after.num_prefix_hit_tokens > before.num_prefix_hit_tokens
    else:
        assert after.num_prefix_hit_tokens == before.num_prefix_hit_tokens
    if dtype == "float32" or "speculative" not in settings:
        assert texts == without
    else:  # a step of three tokens rounds otherwise than three steps of one, and a policy chooses between them
        num_parted_at_ties(path, list(zip(*asked, strict=True)), list(zip(without, texts, strict=True)), TIE)

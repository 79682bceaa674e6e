"""A model that one of two GPUs of unlike memory could not hold has the texts that it has on one large GPU.

Memory is limited twice: raypp reads less from NVML, so that it plans for less, and this process holds the rest.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if torch.cuda.device_count() < 2:
    pytest.skip("needs two CUDA devices", allow_module_level=True)

import pynvml
from workload import exactly, model_settings, random_prompts

from raypp import LLM
from raypp.plan.hardware import visible_indices

LIMITS_BYTES = (16_000_000_000, 32_000_000_000)
MODEL = os.environ.get("UNLIKE_MODEL", "qwen3-14b")  # 29.5 GB in bf16
SETTINGS: dict[str, Any] = {
    "batch_invariant": True,
    "skip_tokenizer_init": True,
    "enable_prefix_caching": False,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 1024,
    "max_model_len": 2048,
}


def texts(llm: LLM) -> list[list[int]]:
    rng = random.Random(5)
    prompts = [prompt for length in (3, 100, 700) for prompt in random_prompts(5, length, 50_000, rng)]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, exactly(48))]


@pytest.fixture
def limit_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Return a function after which both GPUs have the memory of `LIMITS_BYTES`."""
    held: list[torch.Tensor] = []

    def limit() -> None:
        limits = dict(zip(visible_indices(2), LIMITS_BYTES, strict=True))

        def memory_of(handle: Any) -> SimpleNamespace:
            return SimpleNamespace(total=limits[pynvml.nvmlDeviceGetIndex(handle)])

        monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", memory_of)  # this process plans
        for device, limit_bytes in enumerate(LIMITS_BYTES):
            free_bytes, _ = torch.cuda.mem_get_info(device)
            held.append(torch.empty(max(0, free_bytes - limit_bytes), dtype=torch.uint8, device=f"cuda:{device}"))

    yield limit
    held.clear()
    torch.cuda.empty_cache()


def test_stages_fill_gpus_of_unlike_memory(limit_memory: Callable[[], None]) -> None:
    with LLM(**model_settings(MODEL), num_stages=1, **SETTINGS) as llm:
        expected = texts(llm)
    limit_memory()
    with LLM(**model_settings(MODEL), num_stages=2, **SETTINGS) as llm:
        layers = [stage["layers"] for stage in llm.plan()["stages"]]
        print(f"\nlayers: {layers}", flush=True)
        found = texts(llm)
        free_gb = [torch.cuda.mem_get_info(device)[0] / 1e9 for device in range(2)]
    print(f"\nfree while it ran: {free_gb[0]:.2f} and {free_gb[1]:.2f} GB", flush=True)
    first, second = (end - start for start, end in layers)
    assert second > 1.5 * first, "layers do not follow memory"
    assert found == expected

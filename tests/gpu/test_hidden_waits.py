"""Steps never wait for the device or a compiler, whatever rows ask for: a host that waits keeps its neighbours waiting.

torch raises where a call would wait, a copy from ordinary memory among them. Events are no such calls: results are
waited for by them, elsewhere.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from model_configs import write_config

from raypp.config.engine_config import EngineConfig
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.testing import LocalEngine
from raypp.types import SamplingParams

KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.1},
    {"temperature": 0.5, "logit_bias": {5: 2.0}, "min_tokens": 4, "allowed_token_ids": list(range(3, 300))},
)
NGRAM = {"speculative": {"method": "ngram", "num_speculative_tokens": 3}}


@contextmanager
def waits_are_errors() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def kernels_made() -> Iterator[list[str]]:
    """Yield a list that names every kernel that Triton compiles, or loads from its cache, until the end."""
    names: list[str] = []
    if (dry := sys.modules.get("dry_report")) is not None:
        before = set(dry.VARIANTS)
        yield names
        names += [f"{kernel}: {variant}" for kernel, variant in dry.VARIANTS.keys() - before]
        return
    from triton import knobs

    def hook(*, repr: str, **_: Any) -> None:
        names.append(repr)

    kept, knobs.runtime.jit_post_compile_hook = knobs.runtime.jit_post_compile_hook, hook
    try:
        yield names
    finally:
        knobs.runtime.jit_post_compile_hook = kept


def make_engine(model: Path, **settings: Any) -> LocalEngine:
    config = EngineConfig.from_flat(
        str(model),
        load_format="dummy",
        device="cuda",
        skip_tokenizer_init=True,
        max_num_seqs=8,
        max_piecewise_tokens=64,
        **settings,
    )
    return LocalEngine(plan_engine(config, Hardware(2, 1 << 34, 1, "this one", 16 << 30, (9, 0))))


def run(engine: LocalEngine, seed: int, kinds: Sequence[dict[str, Any]] = KINDS) -> None:
    """Run requests of all kinds, half of which start while the others decode; the second half finds cached blocks."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(5, 300) for _ in range(rng.randint(2, 90))] for _ in kinds] * 2
    for index, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=12 + index, seed=index, ignore_eos=True, **kinds[index % len(kinds)])
        engine.submit(prompt, params)
        if index % 2:
            engine.step()
    while engine.has_unfinished:
        engine.step()


# The log-probabilities of a prompt are of as many rows as it has tokens, which may take a product of its own.
AT_ONCE = [kind for kind in KINDS if "prompt_logprobs" not in kind] + [{"temperature": 0.0, "logprobs": 3}]
CPU_KV = {"cpu_kv_bytes": 64 << 20, "num_kv_blocks": 12, "max_model_len": 120}


@pytest.mark.parametrize(
    "settings",
    [{}, NGRAM, {"kv_cache_dtype": "fp8"}, CPU_KV, {"model_impl": "transformers"}],
    ids=["plain", "drafts", "fp8_kv", "cpu_kv", "transformers"],
)
@pytest.mark.parametrize("mode", ["none", "full_and_piecewise"])
def test_steps_wait_for_nothing(tmp_path: Path, mode: str, settings: dict[str, Any]) -> None:
    sizes = {"max_num_batched_tokens": 128, "max_model_len": 512, "num_kv_blocks": 300}
    stages = {"mode": mode, "num_stages": 2, "stage_num_gpus": 0.5}
    engine = make_engine(write_config("small", 2, tmp_path), **(stages | sizes | settings))
    with kernels_made() as kernels:
        run(engine, 2, AT_ONCE)
    assert mode == "none" or not kernels, "\n".join(kernels)  # recordings have all that called steps need
    run(engine, 0)  # what is made when it is first needed is made
    with waits_are_errors():
        run(engine, 1)
    if settings is CPU_KV:
        run(engine, 1)  # what it begins with is in CPU memory
        stats = engine.stats()
        assert stats.num_blocks_copied_out > 0
        assert stats.num_blocks_copied_in > 0


@pytest.mark.parametrize("settings", [{}, {"quantization": "fp8"}], ids=["plain", "fp8"])
def test_long_steps_of_experts_compile_nothing(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Steps of more tokens than graphs hold, of any number."""
    sizes = {"max_num_batched_tokens": 8192, "max_model_len": 8192, "num_kv_blocks": 4000}
    engine = make_engine(write_config("small experts", 2, tmp_path), **(sizes | settings))
    rng = random.Random(3)
    with kernels_made() as kernels:
        for num_tokens in (65, 130, 250, 517, 1000, 1111, 2050, 2999, 4100, 5003, 6200, 7777, 8191):
            engine.submit([rng.randrange(5, 300) for _ in range(num_tokens)], SamplingParams(max_tokens=4))
            for _ in range(rng.randint(1, 4)):
                engine.step()
        while engine.has_unfinished:
            engine.step()
    assert not kernels, "\n".join(kernels)

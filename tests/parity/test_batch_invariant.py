"""A request has the same text and log-probabilities, bit for bit, beside any others and at any number of stages.

The kernels of GPUs run in Triton's interpreter, whose products are summed in order; what is compared is how raypp cuts
sums. `tests/gpu/test_batch_invariant_gpu.py` compares it on GPUs.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import kernel_checks as checks
import numpy as np
import pytest
import torch
from hf_models import make_checkpoint
from sizes import sized
from test_logprobs_hf import run_with_logprobs
from triton.runtime.interpreter import GridExecutor

from raypp.config.engine_config import EngineConfig
from raypp.ops.backend import KernelSet
from raypp.ops.cuda.cuda_kernels import CudaKernels
from raypp.plan.engine_plan import EnginePlan, plan_engine
from raypp.plan.hardware import Hardware
from raypp.stage import build_stage
from raypp.testing import LocalEngine
from raypp.types import SamplingParams

Answer = tuple[list[int], list[float]]

SETTINGS: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_batched_tokens": 9, "min_prefill_chunk_tokens": 3, "enable_prefix_caching": False},
    "prefixes": {"block_size": 4},
    "two stages": {"num_stages": 2, "enable_prefix_caching": False},
    "n-grams": {"speculative": {"method": "ngram", "min_n": 1, "num_speculative_tokens": 2}},
    "preemption": {"num_kv_blocks": 14, "block_size": 4, "max_model_len": 32, "enable_prefix_caching": False},
}
MEMBERS = {"tensor_parallel_size": 2, "enable_prefix_caching": False}
SETTINGS["two stages, chunks and n-grams"] = SETTINGS["two stages"] | SETTINGS["chunks"] | SETTINGS["n-grams"]
IN_CI = ("two stages, chunks and n-grams",)


def answers(engine: LocalEngine, prompts: Sequence[list[int]], together: bool) -> list[Answer]:
    """Return tokens and their log-probabilities of greedy and of sampled requests, each by its own seed."""
    params = [
        SamplingParams(max_tokens=6, temperature=float(index % 2), seed=index, logprobs=0, ignore_eos=True)
        for index in range(len(prompts))
    ]
    pairs = list(zip(prompts, params, strict=True))
    batches = [pairs] if together else [[pair] for pair in pairs]
    reported = [one for batch in batches for one in run_with_logprobs(engine, *map(list, zip(*batch, strict=True)))]
    return [
        (one.request.output_token_ids, np.concatenate([piece.logprobs[:, 0] for piece in one.output]).tolist())
        for one in reported
    ]


def planned(path: Path, **settings: Any) -> EnginePlan:
    fixed = {"max_model_len": 160, "num_kv_blocks": 100, "stage_num_threads": 1, "max_num_seqs": 4}
    return plan_engine(EngineConfig.from_flat(str(path), **(fixed | settings)), Hardware(1))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[list[int]], list[Answer]]]:
    """A model, prompts, and what each of these gets by itself, of one member."""

    def kernels(device: torch.device, dtype: torch.dtype, **others: Any) -> KernelSet:
        others = {name: others[name] for name in ("block_size", "max_query_len", "num_ring_entries")}
        return CudaKernels(device, dtype, is_invariant=True, **others)

    path, rng = tmp_path_factory.mktemp("qwen3"), random.Random(1)
    make_checkpoint("qwen3", 3, path, num_hidden_layers=sized(2, 4))
    with pytest.MonkeyPatch.context() as patch:
        checks.sum_products_in_order(patch)
        patch.setattr(build_stage, "choose_kernels", kernels)
        plan = planned(path, enable_prefix_caching=False)
        phrase, *words = ([rng.randrange(plan.model.vocab_size) for _ in range(n)] for n in (4, 16))
        prompts = [phrase * 3, [*phrase * 2, 5, *phrase, 5], *words]
        yield path, prompts, answers(LocalEngine(plan), prompts, together=False)


@pytest.mark.full
def test_members_give_the_same_bit_for_bit(
    alone: tuple[Path, list[list[int]], list[Answer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other bits than one member's, whose sums are longer."""
    lock, call = threading.RLock(), GridExecutor.__call__  # the interpreter serves one thread at a time

    def one_by_one(*args: Any, **kwargs: Any) -> None:
        with lock:
            call(*args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", one_by_one)
    path, prompts, of_one = alone
    expected = answers(LocalEngine(planned(path, **MEMBERS)), prompts, together=False)
    assert [logprobs for _, logprobs in expected] != [logprobs for _, logprobs in of_one]
    for settings in (MEMBERS, MEMBERS | SETTINGS["two stages"] | SETTINGS["chunks"] | SETTINGS["n-grams"]):
        assert answers(LocalEngine(planned(path, **settings)), prompts, together=True) == expected


@pytest.mark.parametrize(
    "settings", [name if name in IN_CI else pytest.param(name, marks=pytest.mark.full) for name in SETTINGS]
)
def test_texts_are_the_same_bit_for_bit(settings: str, alone: tuple[Path, list[list[int]], list[Answer]]) -> None:
    path, prompts, expected = alone
    engine = LocalEngine(planned(path, **SETTINGS[settings]))
    for _ in range(2 if settings == "prefixes" else 1):
        got = answers(engine, prompts, together=True)
        assert [tokens for tokens, _ in got] == [tokens for tokens, _ in expected]
        assert [logprobs for _, logprobs in got] == [logprobs for _, logprobs in expected]
    assert np.isfinite(np.concatenate([logprobs for _, logprobs in expected])).all()
    stats = engine.stats()
    happened = {
        "chunks": stats.num_prefill_chunks > stats.num_prefills,
        "prefixes": stats.num_prefix_hit_tokens > 0,
        "n-grams": stats.num_draft_tokens > 0,
        "preemption": stats.num_preemptions > 0,
    }
    assert all(is_so for what, is_so in happened.items() if what in settings), stats

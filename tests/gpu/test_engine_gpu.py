"""The engine on GPUs against transformers, token by token in float32: one stage and several, in one process and more.

Stages of one process are joined by local links, Ray actors by `ipc`, two on one GPU, and one on each of two; there also
by `nccl`, and over host memory by `gloo` and `ray_collective`. Two engines on one node, each with a GPU of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from exactness import ExactComparison
from hf_models import FAMILIES, STATE_FAMILIES, make_checkpoint, sizes_for_members

from raypp import LLM
from raypp.actors.cluster import Cluster
from raypp.config.engine_config import EngineConfig
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.testing import LocalEngine
from raypp.types import SamplingParams

NUM_NEW_TOKENS = 32
SETTINGS = {
    "device": "cuda",
    "dtype": "float32",
    "block_size": 8,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,
    "max_piecewise_tokens": 32,
    "min_prefill_chunk_tokens": 8,
    "max_model_len": 160,
    "num_kv_blocks": 200,
}

PLACES = {
    "one stage": {"num_stages": 1},
    "one GPU": {"num_stages": 2, "transport": "ipc", "stage_num_gpus": 0.5},
    "two GPUs": {"num_stages": 2, "transport": "ipc"},
    "two members": {"num_stages": 1, "tensor_parallel_size": 2},
    "two GPUs by nccl": {"num_stages": 2, "transport": "nccl"},
    "two GPUs by gloo": {"num_stages": 2, "transport": "gloo"},
    "two GPUs by ray_collective": {"num_stages": 2, "transport": "ray_collective"},
}


def _prompts(seed: int, vocab_size: int = 128) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(rng.randint(1, 60))] for _ in range(6)]


def _params(max_tokens: list[int]) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for count in max_tokens]


def _generator(llm: LLM) -> Callable[[list[list[int]], list[int]], list[list[int]]]:
    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], _params(max_tokens))
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


@pytest.mark.parametrize("mode", ["none", "auto"])
@pytest.mark.parametrize("family", FAMILIES + STATE_FAMILIES)
def test_stages_of_one_process(tmp_path, family, mode):
    comparison = ExactComparison()
    hardware = Hardware(4, 1 << 34, 1, "this one", torch.cuda.get_device_properties(0).total_memory)
    for seed in range(3):
        num_stages = 1 + seed
        path = make_checkpoint(family, seed, tmp_path / str(seed), min_layers=num_stages)
        settings = SETTINGS | {"num_stages": num_stages, "mode": mode, "stage_num_gpus": 1 / num_stages}
        plan = plan_engine(EngineConfig.from_flat(str(path), **settings), hardware)
        engine = LocalEngine(plan)
        comparison.compare(
            path, _prompts(seed), NUM_NEW_TOKENS, lambda p, n, engine=engine: engine.generate(p, _params(n))
        )
    comparison.assert_rare()


@pytest.mark.parametrize(
    ("place", "family"),
    [
        *((place, family) for place in ("one stage", "one GPU", "two GPUs") for family in FAMILIES),
        *(("two members", family) for family in FAMILIES + STATE_FAMILIES),
        ("two GPUs by nccl", "qwen3"),
        ("two GPUs by gloo", "qwen3"),
        ("two GPUs by ray_collective", "qwen3"),
    ],
)
def test_stages_as_actors(tmp_path, place, family):
    if place.startswith("two ") and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    settings = SETTINGS | {"skip_tokenizer_init": True} | PLACES[place]
    seed = (FAMILIES + STATE_FAMILIES).index(family)
    sizes = sizes_for_members(family, 2, seed) if place == "two members" else {}
    min_layers = 4 if family in STATE_FAMILIES else 2  # with one that attends
    path = make_checkpoint(family, seed, tmp_path / family, min_layers=min_layers, **sizes)
    comparison = ExactComparison()
    with LLM(str(path), **settings) as llm:
        comparison.compare(path, _prompts(seed), NUM_NEW_TOKENS, _generator(llm))
        print(f"\n{place}, {family}: {[stage['graphs'] for stage in llm.stats()['stages']]}")
        last_step_id = llm.stats()["num_steps"] - 1  # it is told of, too, though no step came after it
        assert max(forward.step_id for forward in llm.timeline().forwards) >= last_step_id
    comparison.assert_rare()


def test_two_engines_each_on_a_gpu_of_its_own(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    settings = SETTINGS | {"skip_tokenizer_init": True} | PLACES["one stage"]
    path = make_checkpoint("qwen3", 0, tmp_path / "qwen3")
    comparison = ExactComparison()
    cluster = Cluster.connect()
    try:
        with LLM(str(path), **settings) as first, LLM(str(path), **settings) as second:
            for llm in (first, second):
                comparison.compare(path, _prompts(0), NUM_NEW_TOKENS, _generator(llm))
    finally:
        cluster.disconnect()
    comparison.assert_rare()

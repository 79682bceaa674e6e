"""Decoders that raypp declares no family of, by transformers' modules: tokens equal transformers' own.

Shrunken random models of each type on 1, 2 and 3 stages: prompts in chunks, cached prefixes, preemption, n-grams.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from asked_here import ask_here
from exactness import ExactComparison
from hf_models import choices_of
from safetensors.torch import load_file, save_file
from shrunken_models import make_shrunken
from sizes import sized

from raypp.config.engine_config import EngineConfig
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.testing import LocalEngine
from raypp.types import SamplingParams

PAGE = Path(__file__).parents[2] / "docs/models.md"
NUM_NEW_TOKENS = 12
IN_CI = {
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},  # norms before and after, scaling
    "gpt_oss": {},  # sinks, experts with biases
    "olmo3": {},  # norms behind
    "phi3": {},  # one product for queries, keys and values
    "mistral": {},
    "cohere2": {},  # attention and MLP beside each other, scaled logits
    "granite": {},  # multipliers
    "deepseek_v3": {},  # keys and values of several sizes out of latents
    "ernie4_5": {},
    "hunyuan_v1_dense": {},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},  # short convolutions
}
STATES = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "falcon_h1": {},
    "falcon_mamba": {},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "mamba": {},
    "mamba2": {},
    "nemotron_h": {},
    "olmo_hybrid": {},
    "qwen3_5_moe_text": {},
    "qwen3_5_text": {},
    "qwen3_next": {},
}
"""Types in the long tests whose layers keep states of rows."""
[_LISTED] = re.findall(r"^\| (cohere2,.*) \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
LISTED_IN_CI, IN_SOAK = (names.split(", ") for names in _LISTED)
TYPES = [
    *(pytest.param(name, values, id=name) for name, values in IN_CI.items()),
    *(pytest.param(name, STATES.get(name, {}), id=name, marks=pytest.mark.full) for name in IN_SOAK),
]
RUNS = (
    {"num_stages": 1},
    {"num_stages": 2, "num_kv_blocks": 22},
    {"num_stages": 3, "method": "ngram", "num_speculative_tokens": 2, "min_n": 1},
)


def prompts_of() -> list[list[int]]:
    """Return prompts of mixed lengths; two share a beginning, one repeats itself."""
    rng = random.Random(0)
    shared = [rng.randrange(3, 250) for _ in range(20)]
    prompts = [[rng.randrange(3, 250) for _ in range(count)] for count in (12, 3, 30)]
    return [*prompts, [7, 8, 9, 10] * 5, [*shared, 5], [*shared, 6, 7]]


@pytest.fixture(autouse=True)
def _asked_here(monkeypatch: pytest.MonkeyPatch) -> None:
    ask_here(monkeypatch)


def test_the_page_names_the_types_that_are_tried() -> None:
    assert sorted(IN_CI) == LISTED_IN_CI
    assert set(STATES) <= set(IN_SOAK)


@pytest.mark.parametrize(("model_type", "values"), TYPES)
def test_greedy_tokens_equal_transformers(model_type: str, values: dict[str, object], tmp_path: Path) -> None:
    compare(make_shrunken(model_type, tmp_path, **values), sized(RUNS[1:], RUNS))


def compare(path: Path, runs: Iterable[dict[str, Any]]) -> None:
    """Check that a small model of transformers' modules generates what transformers does, in each of some settings."""
    auto = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()

    @torch.inference_mode()
    def reference(_: Path, prompt: list[int], output: list[int]) -> tuple[list[int], list[float]]:
        logits = model(input_ids=torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
        return choices_of(logits.float(), output)

    comparison, met = ExactComparison(), Counter[str]()
    for settings in runs:
        fixed = {"block_size": 4, "max_num_batched_tokens": 16, "min_prefill_chunk_tokens": 3, "max_model_len": 64}
        more = {"max_num_seqs": 4, "num_kv_blocks": 60, "stage_num_threads": 1, "skip_tokenizer_init": True}
        config = EngineConfig.from_flat(str(path), model_impl="transformers", **(fixed | more | settings))
        plan = plan_engine(config, Hardware(1))
        engine = LocalEngine(plan)

        def generate(prompts: list[list[int]], lengths: list[int], engine: LocalEngine = engine) -> list[list[int]]:
            params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in lengths]
            return engine.generate(prompts, params)

        comparison.compare(path, prompts_of(), NUM_NEW_TOKENS, generate, reference)
        engine.scheduler.check_integrity()
        stats = engine.stats()
        met["chunked"] += stats.num_prefill_chunks > stats.num_prefills
        met["cached"] += stats.num_prefix_hit_tokens > 0
        met["preempted"] += stats.num_preemptions > 0
        met["drafted"] += stats.num_draft_tokens > 0
    comparison.assert_rare()
    sees_all = {group.window for group in plan.groups} == {None}  # groups with a window have blocks enough
    whats = ("chunked", "cached", "drafted", *(("preempted",) if sees_all else ()))
    assert all(met[what] for what in whats), met


def test_a_head_that_is_stored_is_used_though_the_model_is_called_tied(tmp_path: Path) -> None:
    path = make_shrunken("gemma3_text", tmp_path)
    tensors = load_file(path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    texts = []
    for num_stages in (1, 2):
        settings = {"num_stages": num_stages, "stage_num_threads": 1, "skip_tokenizer_init": True, "max_model_len": 64}
        config = EngineConfig.from_flat(str(path), model_impl="transformers", **settings)
        engine = LocalEngine(plan_engine(config, Hardware(1)))
        texts += engine.generate([[5, 6, 7]], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([[5, 6, 7, *texts[0][:-1]]])).logits[0, 2:].argmax(-1).tolist()
    assert list(texts[0]) == list(texts[1]) == expected

"""The models' logits against transformers: chunks, decode, mixed steps, drafts, stages, all over shuffled blocks.

The same prompts end to end, through scheduler and stages, are in `test_engine_hf.py`.
"""

from __future__ import annotations

import random

import pytest
import torch
from hf_models import (
    EXPERT_FAMILIES,
    FAMILIES,
    LATENT_FAMILIES,
    WINDOW_FAMILIES,
    hf_greedy,
    hf_logits,
    make_checkpoint,
)
from paged_runner import PagedRunner
from sizes import sized

from raypp.models.config import load_model_config

SEEDS = range(sized(7, 20))  # seven have every form of rotation and files, and stages
TOLERANCE = 1e-4
IN_CI = ("qwen3", "qwen2", "llama", "qwen3_moe", "mixtral")
ALSO_IN_CI = (
    *IN_CI,
    "ministral3",
    "glm4_moe",
    "minimax_m2",
    "gpt_oss",
    "gemma3",
    "gemma4",
    "gemma4_moe",
    *LATENT_FAMILIES,
)


def _families(in_ci):
    every = (*FAMILIES, *WINDOW_FAMILIES, *LATENT_FAMILIES)
    return [pytest.param(name, marks=() if name in in_ci else pytest.mark.full) for name in every]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Return a function from family and seed to its directory; each is made once."""
    made = {}

    def checkpoint(family, seed):
        if (family, seed) not in made:
            made[family, seed] = make_checkpoint(family, seed, tmp_path_factory.mktemp("hf") / f"{family}-{seed}")
        return made[family, seed]

    return checkpoint


def _tokens(path, count, seed):
    rng = random.Random(seed)
    return [rng.randrange(load_model_config(path).vocab_size) for _ in range(count)]


def _assert_equal(got, expected, what=""):
    scale = max(1.0, expected.abs().max().item())
    assert (got - expected).abs().max().item() <= TOLERANCE * scale, what
    best = expected.topk(2, dim=-1).values
    decided = best[:, 0] - best[:, 1] > TOLERANCE
    assert decided.any()
    assert torch.equal(got.argmax(-1)[decided], expected.argmax(-1)[decided]), what


@pytest.mark.parametrize("family", _families(IN_CI))
def test_logits_of_a_prompt(checkpoints, family):
    for seed in SEEDS:
        path = checkpoints(family, seed)
        tokens = _tokens(path, 41, seed)
        (logits,) = PagedRunner(path, [tokens]).step(prefill=[(0, 41)])
        _assert_equal(logits, hf_logits(path, tokens), f"seed {seed}")


@pytest.mark.parametrize("family", _families(ALSO_IN_CI))
def test_stages_chunks_decode_and_mixed_steps(checkpoints, family):
    """Three rows: one decodes while the second is prefilled in chunks and the third in one piece."""
    for seed in SEEDS:
        path = checkpoints(family, seed)
        num_layers = load_model_config(path).num_layers
        cuts = ([1], [1, num_layers - 1] if num_layers > 2 else [1], [])[seed % 3]
        rows = [_tokens(path, count, seed + 100 * count) for count in (30, 37, 19)]
        runner = PagedRunner(path, rows, cuts=cuts, block_size=(4, 16, 3)[seed % 3], seed=seed)
        got = [[], [], []]

        def step(*args, runner=runner, got=got, **kwargs):
            order = [*(args[0] if args else ()), *(row for row, _ in kwargs.get("prefill", ()))]
            for row, logits in zip(order, runner.step(*args, **kwargs), strict=True):
                got[row].append(logits)

        step(prefill=[(0, 11)])
        step(prefill=[(0, 8), (1, 5)])
        step([0], prefill=[(1, 16)])
        step([0], prefill=[(1, 15), (2, 13)])
        while any(sum(map(len, logits)) < len(row) for logits, row in zip(got, rows, strict=True)):
            step([i for i in (2, 0, 1) if sum(map(len, got[i])) < len(rows[i])])
        for row, logits in zip(rows, got, strict=True):
            _assert_equal(torch.cat(logits), hf_logits(path, row), f"seed {seed}")


@pytest.mark.parametrize("family", _families(ALSO_IN_CI))
@pytest.mark.parametrize("query_len", sized([3], [2, 3, 4]))
def test_decode_of_several_tokens_equals_one_by_one(checkpoints, family, query_len):
    path = checkpoints(family, query_len)
    rows = [_tokens(path, 9 + row + 2 * query_len, row) for row in range(3)]
    several, single = PagedRunner(path, rows, seed=1), PagedRunner(path, rows, seed=2)
    for runner in (several, single):
        runner.step(prefill=[(row, 9 + row) for row in range(3)])
    for _ in range(2):
        together = several.step([0, 1, 2], query_len=query_len)
        one_by_one = [single.step([0, 1, 2]) for _ in range(query_len)]
        for row in range(3):
            torch.testing.assert_close(
                together[row], torch.cat([step[row] for step in one_by_one]), atol=TOLERANCE, rtol=1e-5
            )


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoints_are_worth_comparing_with(checkpoints, family):
    """Distinct configurations with every feature, and continuations that neither repeat one token nor hang on ties."""
    configs = [load_model_config(checkpoints(family, seed)) for seed in SEEDS]
    assert len(set(configs)) == len(SEEDS)
    assert {config.attention[0].num_heads // config.attention[0].num_kv_heads for config in configs} == {1, 2, 4}
    assert {config.tie_word_embeddings for config in configs} == {True, False}
    assert {config.dtype for config in configs} == {"float32", "bfloat16", "float16"}
    assert {config.attention[0].rope.rope_type for config in configs} == {
        "default",
        "llama3",
        "linear",
        "yarn",
        "dynamic",
    }
    if family not in ("qwen2", "mixtral", "minimax_m2"):
        assert {config.qkv_bias for config in configs} == {True, False}
    if family != "qwen2":
        assert any(
            config.attention[0].head_dim != config.hidden_size // config.attention[0].num_heads for config in configs
        )
    if family in EXPERT_FAMILIES:
        experts = [config.experts for config in configs]
        assert {one.num_experts for one in experts} == {3, 4, 5, 60}
        in_groups = family == "glm4_moe"  # of four experts those of one of two groups
        assert {one.num_chosen for one in experts} == {1, 2, 3, 4, 6} - ({4} if in_groups else set())
        assert any(one.num_groups > 1 for one in experts) == in_groups
    if family == "qwen3_moe":
        assert {one.normalizes for one in experts} == {True, False}
        assert {frozenset(), frozenset({0}), frozenset({1})} <= {one.dense_layers for one in experts}
    assert {(checkpoints(family, seed) / "model.safetensors").exists() for seed in SEEDS} == {True, False}
    distinct, near_ties = [], 0
    for seed in SEEDS:
        tokens, gaps = hf_greedy(checkpoints(family, seed), _tokens(checkpoints(family, seed), 8, seed), 32)
        distinct.append(len(set(tokens)))
        near_ties += sum(gap < TOLERANCE for gap in gaps)
    print(f"\n{family}: distinct of 32 tokens {sorted(distinct)}, near-ties {near_ties}")
    assert sorted(distinct)[len(distinct) // 2] >= 8
    assert near_ties <= 1

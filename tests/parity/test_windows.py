"""Layers with windows, sinks, soft caps and latents against transformers: stages, chunks, prefixes, drafts, masks.

Windows are shorter than chunks and drafts, and no multiples of the block size. Groups with a window have few blocks.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from exactness import ExactComparison
from hf_models import LATENT_FAMILIES, WINDOW_FAMILIES, hf_choices, make_checkpoint
from mixed_layers import ARCHITECTURE, FAMILY, make_mixed, mixed_choices
from sizes import sized

from raypp.api.tokenizer import Tokenizer
from raypp.config.engine_config import EngineConfig
from raypp.models.families import FAMILIES
from raypp.plan.engine_plan import EnginePlan, plan_engine
from raypp.plan.hardware import Hardware
from raypp.testing import LocalEngine
from raypp.types import SamplingParams

SEEDS = sized((1, 2), range(24))
SEEDS_OF_FAMILIES = sized((1,), range(24))  # one meets everything; layers of other kinds get two
LENGTH = sized(1500, 5000)
NUM_NEW_TOKENS = sized(32, 40)
KINDS = (*WINDOW_FAMILIES, *LATENT_FAMILIES, "mixed")
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
IN_CI = (("gpt_oss", ""), ("gemma4_moe", "ngram"), ("mixed", "ngram"))


@pytest.fixture(autouse=True)
def _mixed_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, ARCHITECTURE, FAMILY)


def _make(kind: str, seed: int, path: Path) -> tuple[Path, Callable]:
    if kind == "mixed":
        return make_mixed(path, seed), mixed_choices
    return make_checkpoint(kind, seed, path, min_layers=4), hf_choices


def _plan(path: Path, seed: int, **more: object) -> EnginePlan:
    """Return an engine's plan; over the seeds all corners are met."""
    rng = random.Random(seed)
    block_size, is_tight = (4, 8, 16)[seed % 3], seed % 2 == 1
    settings = {
        "num_stages": 1 + seed % 4,
        "block_size": block_size,
        "max_num_batched_tokens": rng.choice([16, 24, 40]),
        "min_prefill_chunk_tokens": rng.choice([3, 8]),
        "enable_prefix_caching": seed % 4 < 3,
        "max_model_len": 160,
        "max_num_seqs": rng.choice([6, 8]),
        "num_kv_blocks": 1 + (320 if is_tight else 2400) // block_size,
        "stage_num_threads": 1,
        "cpu_kv_bytes": 1 << 22 if seed % 4 == 1 else 0,
    }
    plan = plan_engine(EngineConfig.from_flat(str(path), **(settings | more)), Hardware(1))
    if not is_tight:
        return plan
    return with_few_blocks(plan, 5 if plan.groups[0].window is not None or seed % 8 == 3 else 18)


def with_few_blocks(plan: EnginePlan, num_more: int) -> EnginePlan:
    """Return the plan with groups with a window that have `num_more` blocks beside those of one request."""
    limits = plan.scheduler_limits()
    few = [
        group
        if group.window is None
        else replace(group, num_blocks=1 + limits.num_held_blocks(group, limits.max_model_len) + num_more)
        for group in plan.groups
    ]
    return replace(plan, groups=tuple(few))


def _prompts(rng: random.Random, vocab_size: int) -> list[list[int]]:
    """Return prompts of mixed lengths; three of them share a long prefix, one repeats itself."""
    shared = [rng.randrange(vocab_size) for _ in range(48)]
    prompts = [[rng.randrange(vocab_size) for _ in range(rng.randint(1, 70))] for _ in range(3)]
    prompts.append([rng.randrange(vocab_size) for _ in range(7)] * 8)
    return prompts + [shared + [rng.randrange(vocab_size) for _ in range(rng.randint(1, 9))] for _ in range(3)]


@pytest.mark.parametrize(
    ("kind", "drafts"),
    [
        pytest.param(kind, drafts, id=f"{kind}-{name}", marks=[] if (kind, name) in IN_CI else pytest.mark.full)
        for kind in KINDS
        for name, drafts in (("", {}), ("ngram", NGRAM))
    ],
)
def test_greedy_tokens_equal_transformers(kind, drafts, tmp_path):
    comparison, met = ExactComparison(), Counter()
    for seed in SEEDS_OF_FAMILIES if kind in WINDOW_FAMILIES else SEEDS:
        path, reference = _make(kind, seed, tmp_path / str(seed))
        plan = _plan(path, seed, **drafts)
        engine = LocalEngine(plan)

        def generate(prompts, lengths, engine=engine):
            params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in lengths]
            return engine.generate(prompts, params)

        prompts = _prompts(random.Random(seed), plan.model.vocab_size)
        # Twice: the second round finds the first one's prefixes, prompts and outputs, in the cache.
        for _ in range(2 if plan.config.cache.enable_prefix_caching else 1):
            comparison.compare(path, prompts, NUM_NEW_TOKENS, generate, reference)
        engine.scheduler.check_integrity()
        stats = engine.stats()
        met["chunked"] += stats.num_prefill_chunks > stats.num_prefills
        met["cached"] += stats.num_prefix_hit_tokens > 0
        met["copied back"] += stats.num_blocks_copied_in > 0
        met["preempted"] += stats.num_preemptions > 0
        met["drafts accepted"] += stats.num_accepted_tokens > 0
        met["drafts refused"] += stats.num_accepted_tokens < stats.num_draft_tokens
    print(f"\n{kind}: {dict(met)}")
    comparison.assert_rare()
    for what in (
        "chunked",
        "cached",
        "copied back",
        "preempted",
        *(("drafts accepted", "drafts refused") if drafts else ()),
    ):
        assert met[what] >= 1, f"{what} was met only {met[what]} times"


def _tiny_with_windows(path: Path) -> Path:
    """Write the embedded model with a window in two of three layers."""
    source = Path(plan_engine(EngineConfig.from_flat("tiny"), Hardware(1)).model_path)
    for file in source.iterdir():
        (path / file.name).symlink_to(file)
    values = json.loads((path / "config.json").read_text())
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    values |= {"use_sliding_window": True, "sliding_window": 24}
    values["layer_types"] = [kinds[index % 3] for index in range(values["num_hidden_layers"])]
    (path / "config.json").unlink()
    (path / "config.json").write_text(json.dumps(values))
    return path


def test_late_masks_change_nothing(tmp_path):
    """A row without its mask computes its last position again: what that sees must still be there."""
    path, schema = _tiny_with_windows(tmp_path), {"type": "object", "properties": {"name": {"type": "string"}}}
    tokenizer, texts = Tokenizer(str(path)), []
    for num_stages, more, lateness in (
        (1, {}, None),
        *sized((), ((2, {"num_kv_blocks": 30, "max_model_len": 200}, random.Random(1)),)),
        (3, {"speculative": {"method": "ngram", "num_speculative_tokens": 4}}, random.Random(2)),
    ):
        settings = {"num_stages": num_stages, "block_size": 8, "stage_num_threads": 1, **more}
        plan = plan_engine(EngineConfig.from_flat(str(path), **settings), Hardware(1))
        engine = LocalEngine(plan, mask_lateness=lateness)
        ends, requests = frozenset(plan.model.eos_token_ids), []
        for seed in range(4):
            [prompt] = tokenizer.encode(["import json\n\nvalue = " * (1 + seed)])
            constraint = {"json_schema": schema} if seed % 4 else {"regex": "[a-z ]{40,60}"}
            params = SamplingParams(max_tokens=sized(40, 70), temperature=1.0, seed=seed, structured_outputs=constraint)
            requests.append(engine.submit(prompt, params, eos_token_ids=ends))
        while engine.has_unfinished:
            engine.step()
        engine.drain()
        engine.scheduler.check_integrity()
        assert engine.stats().num_late_masks or lateness is None
        texts.append([request.output_token_ids for request in requests])
    assert all(each == texts[0] for each in texts)


def test_a_long_text_through_windows_of_64(tmp_path):
    """A windowed group needs no more blocks for it than for a short one."""
    path = make_mixed(tmp_path, 5)
    settings = {"num_stages": 2, "max_model_len": 6000, "max_num_batched_tokens": 256, "num_kv_blocks": 400}
    plan = plan_engine(EngineConfig.from_flat(str(path), **settings, stage_num_threads=1), Hardware(1))
    plan = with_few_blocks(plan, 4)
    assert max(group.num_blocks for group in plan.groups[1:]) < 20
    engine = LocalEngine(plan)
    rng = random.Random(0)
    prompt = [rng.randrange(plan.model.vocab_size) for _ in range(LENGTH)]
    comparison = ExactComparison()
    comparison.compare(
        path,
        [prompt],
        64,
        lambda prompts, lengths: engine.generate(
            prompts, [SamplingParams(max_tokens=lengths[0], temperature=0.0, ignore_eos=True)]
        ),
        mixed_choices,
    )
    comparison.assert_rare()

"""Texts do not depend on the number of members: requests of all kinds, random engines, deaths, late masks, drafts.

What one member makes of them is compared with transformers elsewhere; here it is the reference.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
from answer_comparison import MAX_LOGPROB_GAP, Comparison
from foreseeing import Foreseeing
from handing_over import Answer, Asked, MortalEngines
from request_kinds import SCHEMA, make_with_tokens, requests_of_all_kinds, tokenizer, tokens_of
from sizes import IS_FULL, sized

from raypp import LLM, SamplingParams
from raypp.config.engine_config import EngineConfig
from raypp.models.config import load_model_config
from raypp.models.registry import resolve_model_path
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.stage import speculation
from raypp.testing import LocalEngine, ThreadedEngine, launch_in_threads

RATES = (0.0, 0.3, 0.7, 1.0)
"""Of drafts that are right."""
MODELS: dict[str, dict[str, Any]] = {
    "heads that divide": {"family": "qwen3", "num_key_value_heads": 12},
    "KV heads of several": {"family": "qwen3", "num_key_value_heads": 1},
    "a window": {"family": "ministral", "num_key_value_heads": 1, "sliding_window": 21},
    "states": {
        "family": "qwen3_5",
        "num_key_value_heads": 1,
        "linear_num_key_heads": 12,
        "linear_num_value_heads": 12,
    },
    "experts": {"family": "qwen3_moe", "num_key_value_heads": 1, "moe_intermediate_size": 48},
}
SIZES = {"hidden_size": 96, "num_attention_heads": 12, "intermediate_size": 96}
WAIT_S = 120.0  # for what is expected; only a hang takes this long
IN_CI = "KV heads of several"
SEEDS_PER_GROUP = 3
SEEDS_IN_CI = (4,)  # masks come late and an engine dies


Undisturbed = Callable[[str], tuple[str, list[Answer]]]


@pytest.fixture(scope="module")
def undisturbed_of(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Return what makes a model, and its answers with one member on one stage."""

    @cache
    def undisturbed(name: str) -> tuple[str, list[Answer]]:
        sizes = SIZES | MODELS[name]
        path = str(make_with_tokens(sizes.pop("family"), 2, tmp_path_factory.mktemp("model"), min_layers=4, **sizes))
        engines = MortalEngines(_engines(path, [{}], None), tokenizer().decode, random.Random(0))
        return path, engines.answer(requests_of_all_kinds())

    return undisturbed


def _engines(path: str, settings: Sequence[dict[str, Any]], lateness: random.Random | None) -> list[Any]:
    fixed = {"stage_num_threads": 1, "max_num_seqs": 24, "max_model_len": 200}
    plans = [plan_engine(EngineConfig.from_flat(path, **(fixed | one)), Hardware(1)) for one in settings]
    # Every second one on one node; in the others members send slices.
    return [
        lambda plan=plan, has_nodes=index % 2 == 0: LocalEngine(plan, mask_lateness=lateness, has_nodes=has_nodes)
        for index, plan in enumerate(plans)
    ]


def _life(rng: random.Random, name: str, count: int) -> dict[str, Any]:
    block_size, num_drafts = rng.choice([4, 8, 16]), rng.choice([0, 1, 3, 7])
    num_snapshots = rng.choice([0, 1, 8]) if name == "states" else 8
    ngram = {"method": "ngram", "num_speculative_tokens": num_drafts}
    return {
        "tensor_parallel_size": count,
        "num_stages": rng.randint(1, 3),
        "block_size": block_size,
        "max_num_batched_tokens": rng.choice([32, 40, 64]),
        "min_prefill_chunk_tokens": rng.choice([1, 8]),
        "num_kv_blocks": 1 + rng.choice([480, 4000]) // block_size,
        "cpu_kv_bytes": rng.choice([0, 1 << 21, 1 << 24]) if num_snapshots else 0,
        **({"num_state_snapshots": num_snapshots} if name == "states" else {}),
        **({"speculative": ngram} if num_drafts else {}),
    }


def _full(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.full)


@pytest.mark.parametrize("group", [0, _full(1)])
@pytest.mark.parametrize("name", [each if each == IN_CI else _full(each) for each in MODELS])
def test_texts_stay_whatever_happens(name, group, undisturbed_of, monkeypatch):
    """Random members, stages, blocks, chunks and drafts; masks come late, requests end early, engines die."""
    path, undisturbed = undisturbed_of(name)
    texts = [answer.asked.prompt.tolist() + answer.token_ids for answer in undisturbed]
    comparison, met = Comparison(path), Counter[str]()
    for seed in sized(SEEDS_IN_CI, range(SEEDS_PER_GROUP * group, SEEDS_PER_GROUP * (group + 1))):
        rng = random.Random(f"{name} {seed}")
        rate = rng.choice(RATES)

        def foreseeing(spec: Any, tokens: Any, *_: Any, rate: float = rate) -> Foreseeing:
            return Foreseeing(texts, tokens, rate, spec.max_drafts)

        monkeypatch.setattr(speculation, "_proposer", foreseeing)
        # One life has one member now and then: a text goes on across numbers of members.
        lives = [_life(rng, name, count) for count in (rng.choice([2, 3, 4]), rng.randint(1, 4), rng.choice([2, 3, 4]))]
        lateness = rng if seed % 2 == 0 else None
        num_deaths = seed % 3
        engines = MortalEngines(_engines(path, lives, lateness), tokenizer().decode, rng, num_deaths=num_deaths)
        answers = engines.answer(requests_of_all_kinds())
        stats = engines.engine.stats()
        met[f"{lives[num_deaths]['tensor_parallel_size']} members"] += 1
        met["handed over"] += engines.num_handed_over > 0
        met["preempted"] += stats.num_preemptions > 0
        met["late masks"] += stats.num_late_masks > 0
        met["hits"] += stats.num_prefix_hit_tokens > 0
        met["accepted"] += stats.num_accepted_tokens > 0
        met["refused"] += stats.num_accepted_tokens < stats.num_draft_tokens
        comparison.compare(answers, undisturbed)
    print(f"\n{dict(met)}: {comparison.num_tokens} tokens are equal, {comparison.num_excused} near-ties excused")
    if not IS_FULL:
        what = ("handed over", "preempted", "late masks", "hits", "accepted", "refused")
        assert all(met[each] for each in what), "another seed is needed in CI"
    assert comparison.num_excused <= max(1, comparison.num_tokens // 1000)


@pytest.mark.full  # one engine at one rate; those of CI, above, meet all of it
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("rate", RATES)
def test_texts_stay_with_drafts_and_late_masks(count, rate, undisturbed_of, monkeypatch):
    """All kinds of requests on a tight cache: drafts of a known rate are right, and masks come late."""
    path, undisturbed = undisturbed_of(IN_CI)
    texts = [answer.asked.prompt.tolist() + answer.token_ids for answer in undisturbed]
    monkeypatch.setattr(
        speculation, "_proposer", lambda spec, tokens, *_: Foreseeing(texts, tokens, rate, spec.max_drafts)
    )
    comparison, met = Comparison(path), Counter[str]()
    for num_stages in (1, 2, 3):
        settings = {
            "tensor_parallel_size": count,
            "num_stages": num_stages,
            "block_size": 4,
            "num_kv_blocks": 80,
            "max_num_batched_tokens": 40,
            "min_prefill_chunk_tokens": 5,
            "speculative": {"method": "ngram", "num_speculative_tokens": 3},
        }
        rng = random.Random(f"{count} {rate} {num_stages}")
        engines = MortalEngines(_engines(path, [settings], rng), tokenizer().decode, rng)
        comparison.compare(engines.answer(requests_of_all_kinds()), undisturbed)
        stats = engines.engine.stats()
        met["preempted"] += stats.num_preemptions > 0
        met["late masks"] += stats.num_late_masks > 0
        met["accepted"] += stats.num_accepted_tokens > rate * stats.num_draft_tokens / 4
    assert all(met[what] for what in ("preempted", "late masks", "accepted"))
    print(f"\n{comparison.num_tokens} tokens are equal, {comparison.num_excused} near-ties excused")
    assert comparison.num_excused <= max(1, comparison.num_tokens // 1000)


def _truncated() -> list[Asked]:
    """Return draws of few tokens and of most, from flat logits, under masks, and with all that changes logits."""
    rng, some = random.Random(1), list(range(5, 200))
    eos = frozenset(load_model_config(resolve_model_path("tiny")).eos_token_ids)
    truncations: list[dict[str, Any]] = [
        {"top_k": 1},
        {"top_p": 1e-6},
        {"min_p": 0.2},
        {"top_k": 20, "top_p": 0.95, "temperature": 0.6},
        {"top_p": 0.9, "temperature": 2.0},
        {"top_k": 300, "top_p": 0.5, "min_p": 0.01},
        {"top_k": 1000000},
    ]
    changes: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.4, "logprobs": 3},
        {"logit_bias": {token: 3.0 for token in some[:40]}, "allowed_token_ids": some},
        {"bad_words": ["self", "return"], "min_tokens": 12, "ignore_eos": False},
        {"structured_outputs": {"regex": r"([a-z]{2,9} ){9}[0-9]{6}"}, "ignore_eos": False},
        {"structured_outputs": {"json_schema": SCHEMA}, "ignore_eos": False},
    ]
    words = tuple(tuple(tokens_of(word).tolist()) for word in ("self", "return"))
    return [
        Asked(
            f"{truncation} {list(change)}",
            tokens_of(rng.choice(["def main(", "import os", "class Node:"])),
            SamplingParams(
                **{"max_tokens": 24, "temperature": 1.0, "seed": rng.getrandbits(40), "ignore_eos": True}
                | truncation
                | change
            ),
            eos,
            bad_words=words if "bad_words" in change else (),
        )
        for truncation in truncations
        for change in changes
    ]


@pytest.mark.in_ci("2-1")
@pytest.mark.parametrize(("count", "num_stages"), [(2, 1), (4, 2), _full(2, 2), _full(4, 1), _full(3, 1)])
def test_truncated_draws_are_those_of_one_member(count, num_stages, undisturbed_of):
    path, _ = undisturbed_of(IN_CI)
    members = {"tensor_parallel_size": count, "num_stages": num_stages, "num_kv_blocks": 400}
    expected, found = (
        MortalEngines(_engines(path, [settings], None), tokenizer().decode, random.Random(0)).answer(_truncated())
        for settings in ({}, members)
    )
    comparison = Comparison(path)
    comparison.compare(found, expected)
    print(f"\n{comparison.num_tokens} tokens are equal, {comparison.num_excused} near-ties excused")
    assert comparison.num_excused <= 1


@pytest.mark.parametrize(("count", "num_stages"), [(2, 2), _full(4, 1), _full(4, 3)])
def test_answers_of_the_api_stay_when_the_engine_dies(count, num_stages):
    """Continuations, stop strings and log-probabilities through driver and wire; the engine dies twice meanwhile."""
    prompts = ["def main(", "import os", "class Node:", "for i in"]
    kinds: list[dict[str, Any]] = [
        {"n": 3, "temperature": 0.8, "seed": 1, "logprobs": 2},
        {"temperature": 0.0, "stop": ["return", "zzz"], "prompt_logprobs": 1},
        {"n": 2, "temperature": 1.0, "top_p": 0.9, "seed": 2, "bad_words": ["self"]},
        {"temperature": 0.0, "logprobs": 1, "repetition_penalty": 1.2},
    ]
    params = [SamplingParams(**({"max_tokens": sized(40, 120), "ignore_eos": True} | kind)) for kind in kinds]

    handles: list[ThreadedEngine] = []

    def launch(config: EngineConfig, **factory: Any) -> ThreadedEngine:
        handles.append(launch_in_threads(config, **factory))
        return handles[-1]

    def engine(**settings: Any) -> LLM:
        # Few rows: so some requests have not ended when the engine dies.
        return LLM("tiny", launch=launch, max_num_seqs=4, **settings)

    with engine() as llm:
        right = llm.generate(prompts, params)
    members = {"num_stages": num_stages, "tensor_parallel_size": count, "device": "cpu", "stage_num_threads": 1}
    with engine(max_engine_restarts=2, **members) as llm, ThreadPoolExecutor(1) as pool:
        pending = pool.submit(llm.generate, prompts, params)
        for life in range(2):
            ends = time.monotonic() + WAIT_S
            while (stats := llm.stats())["recoveries"]["count"] < life or stats.get("num_generated_tokens", 0) < 20:
                assert time.monotonic() < ends, "never: tokens"
            handles[-1].kill_stage(0)
        found = pending.result(WAIT_S)
        assert llm.stats()["recoveries"]["num_carried_over"] > 0
    for one, other in zip(found, right, strict=True):
        for completion, expected in zip(one.outputs, other.outputs, strict=True):
            assert (completion.text, completion.token_ids) == (expected.text, expected.token_ids)
            assert completion.finish_reason == expected.finish_reason
            _assert_close(completion.logprobs, expected.logprobs)
        _assert_close(one.prompt_logprobs, other.prompt_logprobs)


def _assert_close(found: Any, right: Any) -> None:
    assert (found is None) == (right is None)
    for beside, expected in zip(found or (), right or (), strict=True):
        shared = (beside or {}).keys() & (expected or {}).keys()
        assert len(shared) >= len(expected or ()) - 1, "of the last two that are reported, either may be"
        assert all(abs(beside[token].logprob - expected[token].logprob) < MAX_LOGPROB_GAP for token in shared)

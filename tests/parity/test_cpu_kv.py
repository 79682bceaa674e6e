"""KV blocks in CPU memory change no text, and spare prompts that would be computed again.

Conversations of several turns, whose prompts share nine tenths, with a KV cache of a tenth of what they need: on 1 to 4
stages, in chunks, with drafts of both kinds, in 8 bits, with preemption, and with blocks of several sizes. Where layers
keep states, snapshots of them come and go likewise.
"""

from __future__ import annotations

import random

import pytest
from eagle_reference import make_head
from hf_models import make_checkpoint
from sampling_reference import Case

from raypp.config.engine_config import EngineConfig
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.scheduler.scheduler_stats import SchedulerStats
from raypp.testing import LocalEngine
from raypp.types import SamplingParams

NUM_USERS, NUM_TURNS = 8, 3
NUM_SHARED, NUM_OWN, NUM_NEW = 54, 6, 8
MAX_LEN = NUM_SHARED + NUM_TURNS * (NUM_OWN + NUM_NEW)
NEEDED = NUM_SHARED * 2 + NUM_USERS * (MAX_LEN - NUM_SHARED)  # tokens of all texts: users begin in two ways
PLENTY = 400  # blocks
FIXED = {
    "stage_num_threads": 1,
    "max_model_len": MAX_LEN,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 64,
    "num_kv_blocks": PLENTY,
}
HARDWARE = Hardware(1)
HEAD = {"num_stages": 2, "block_size": 6}
WAYS = {
    "one stage": {"block_size": 4},
    "two stages, chunks": {"num_stages": 2, "max_num_batched_tokens": 16, "min_prefill_chunk_tokens": 3},
    "three stages": {"num_stages": 3, "block_size": 5, "max_num_batched_tokens": 24, "min_prefill_chunk_tokens": 8},
    "four stages": {"num_stages": 4, "block_size": 7},
    "n-grams": {"num_stages": 2, "block_size": 3, "speculative": {"method": "ngram", "num_speculative_tokens": 3}},
    "a head": HEAD,
    "in 8 bits, n-grams and a head": HEAD | {"kv_cache_dtype": "fp8"},
}
IN_CI = ("n-grams", "in 8 bits, n-grams and a head")
STATE_WAYS = ("one stage", "two stages, chunks", "four stages", "n-grams")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint("qwen3", 4, tmp_path_factory.mktemp("qwen3"), min_layers=4)


def converse(
    path, hardware: Hardware = HARDWARE, cases: list[Case] | None = None, **settings
) -> tuple[list[list[int]], SchedulerStats]:
    """Return the answers of all users, turn after turn, and what happened; add what was asked to `cases`."""
    plan = plan_engine(EngineConfig.from_flat(str(path), **(FIXED | settings)), hardware)
    engine, rng, vocab_size = LocalEngine(plan), random.Random(0), plan.model.vocab_size

    def tokens(count: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(count)]

    beginnings = [tokens(NUM_SHARED) for _ in range(2)]
    texts = [beginnings[user % 2] + tokens(NUM_OWN) for user in range(NUM_USERS)]
    answers = []
    params = [
        SamplingParams(max_tokens=NUM_NEW, temperature=0.0 if user % 3 else 0.6, seed=user, ignore_eos=True)
        for user in range(NUM_USERS)
    ]
    for turn in range(NUM_TURNS):
        requests = []
        for text, of_user in zip(texts, params, strict=True):
            requests.append(engine.submit(text, of_user))
            engine.step()
        while engine.has_unfinished:
            engine.step()
            engine.scheduler.check_integrity()
        answers += [request.output_token_ids for request in requests]
        if cases is not None:
            cases += [Case(text, of_user) for text, of_user in zip(texts, params, strict=True)]
        texts = [
            text + request.output_token_ids + (tokens(NUM_OWN) if turn + 1 < NUM_TURNS else [])
            for text, request in zip(texts, requests, strict=True)
        ]
    engine.drain()
    return answers, engine.stats()


def num_computed(stats: SchedulerStats) -> int:
    """Return the tokens that prefills computed."""
    return stats.num_prefix_query_tokens - stats.num_prefix_hit_tokens


def scarce(settings: dict, share: float) -> dict:
    """Return settings with a KV cache that holds a share of what the traffic needs, or at least one request."""
    block_size = settings.get("block_size", 16)
    return settings | {"num_kv_blocks": 1 + max(-(-MAX_LEN // block_size), int(NEEDED * share / block_size))}


@pytest.fixture(scope="module")
def expected(checkpoint):
    return {
        kv_dtype: converse(checkpoint, block_size=4, enable_prefix_caching=False, kv_cache_dtype=kv_dtype)
        for kv_dtype in ("model", "fp8")
    }


@pytest.mark.in_ci("in 8 bits, n-grams and a head")
@pytest.mark.parametrize("way", [way if way in IN_CI else pytest.param(way, marks=pytest.mark.full) for way in WAYS])
def test_text_does_not_depend_on_it(checkpoint, expected, way, tmp_path):
    settings = dict(WAYS[way])
    if "a head" in way:
        head = str(make_head("eagle3", checkpoint, tmp_path / "head"))
        method = "auto" if "n-grams" in way else "eagle3"
        settings["speculative"] = {"method": method, "model": head, "num_speculative_tokens": 2}
    texts, stats = converse(checkpoint, cpu_kv_bytes=1 << 24, **scarce(settings, 0.25))
    assert texts == expected[settings.get("kv_cache_dtype", "model")][0]
    assert stats.num_blocks_copied_out > 0
    assert 0 < stats.num_cpu_hit_tokens <= stats.num_prefix_hit_tokens
    assert stats.num_copied_bytes > 0
    assert stats.num_prefill_chunks > stats.num_prefills or "chunks" not in way


def test_a_tenth_of_the_memory_computes_little_more_than_all_of_it(checkpoint, expected):
    settings = {"num_stages": 2, "block_size": 4, "max_num_seqs": 2}
    few = scarce(settings, 0.1)
    _, plenty = converse(checkpoint, **settings)
    _, without = converse(checkpoint, **few)
    texts, stats = converse(checkpoint, cpu_kv_bytes=1 << 24, **few)
    assert texts == expected["model"][0]
    computed = [num_computed(each) for each in (plenty, without, stats)]
    print(f"\nprefills computed {computed} tokens: in plenty of memory, in a tenth, in a tenth with CPU memory")
    assert stats.num_cpu_hit_tokens > stats.num_prefix_hit_tokens / 2
    assert computed[2] < 1.1 * computed[0]
    assert computed[1] > 1.5 * computed[2]
    assert (without.num_blocks_copied_out, without.num_cpu_hit_tokens, without.num_copied_bytes) == (0, 0, 0)


def test_little_cpu_memory_forgets_what_was_used_longest_ago(checkpoint, expected):
    settings = scarce({"num_stages": 2, "block_size": 4, "max_num_seqs": 4}, 0.1)
    texts, stats = converse(checkpoint, cpu_kv_bytes=1 << 16, **settings)
    assert texts == expected["model"][0]
    assert stats.num_used_cpu_blocks == stats.num_cpu_blocks < stats.num_blocks_copied_out


@pytest.mark.parametrize(
    "way", [way if way in IN_CI else pytest.param(way, marks=pytest.mark.full) for way in STATE_WAYS]
)
def test_states_come_back_beside_blocks(tmp_path, way):
    path = make_checkpoint("qwen3_5", 2, tmp_path, min_layers=4)
    settings = {"min_prefill_chunk_tokens": 1} | WAYS[way]
    expected, _ = converse(path, enable_prefix_caching=False, **settings)
    few = scarce(settings, 0.2) | {"num_state_snapshots": 2, "max_num_seqs": 4}
    _, without = converse(path, **few)
    texts, stats = converse(path, cpu_kv_bytes=1 << 24, **few)
    assert texts == expected
    computed = [num_computed(each) for each in (without, stats)]
    print(f"\nprefills computed {computed} tokens: without CPU memory, and with it")
    assert stats.num_snapshots_copied_in > NUM_USERS
    assert stats.num_cpu_hit_tokens > 0
    assert computed[1] < 0.8 * computed[0]


@pytest.mark.full
@pytest.mark.parametrize("method", [None, "ngram"])
def test_who_was_preempted_computes_little_again(checkpoint, method):
    """Requests that grow until most of them are preempted: without CPU memory they compute their texts again."""
    rng = random.Random(1)
    prompts = [[rng.randrange(100) for _ in range(rng.randint(4, 20))] for _ in range(8)]
    params = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    runs = {}
    for cpu_kv_bytes, num_kv_blocks in ((0, PLENTY), (0, 60), (1 << 24, 60)):
        settings = FIXED | {"num_stages": 2, "block_size": 4, "max_num_seqs": 8, "speculative": {"method": method}}
        memory = {"num_kv_blocks": num_kv_blocks, "cpu_kv_bytes": cpu_kv_bytes}
        engine = LocalEngine(plan_engine(EngineConfig.from_flat(str(checkpoint), **(settings | memory)), Hardware(1)))
        texts = engine.generate(prompts, params)
        engine.scheduler.check_integrity()
        runs[cpu_kv_bytes, num_kv_blocks] = texts, engine.stats()
    (expected, plenty), (_, without), (texts, stats) = runs.values()
    assert texts == expected
    assert plenty.num_preemptions == 0
    assert stats.num_preemptions >= 3
    again = [num_computed(each) - sum(map(len, prompts)) for each in (without, stats)]
    print(f"\ncomputed again: {again[0]} tokens, with CPU memory {again[1]}")
    # What comes back are full blocks: of each, up to a block and what steps in flight brought is computed again.
    assert again[1] <= stats.num_preemptions * (4 + 8)
    assert again[0] > 2 * again[1]

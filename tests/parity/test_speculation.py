"""Text does not depend on speculation: every family, 1 to 4 stages, 1 to 8 drafts, rows of all kinds in one batch.

What comes out without speculation is compared with transformers elsewhere; here it is the reference. The requests of
a cell arrive one after the other, so that prompts ride with rows that verify drafts, and in most of the cells the KV
cache is too small for all of them at once.

By default a cell has one of the eight numbers of drafts, so that each of them meets two families or more; with
TEST_SIZES=all it has all of them. Those of heads go to the families in turn: each runs on each number of stages.
So do, by default, those whose number of drafts is chosen by the engine.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from eagle_reference import make_head
from exactness import TIE_GAP
from hf_models import FAMILIES, hf_logits, make_checkpoint
from sizes import IS_FULL

from raypp.config.engine_config import EngineConfig
from raypp.ops.sample.token_choice import gumbel_noise, mask_truncated
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.request import Request
from raypp.scheduler.scheduler_stats import SchedulerStats
from raypp.specdec import draft_tables
from raypp.testing import LocalEngine
from raypp.types import SamplingParams

NUM_TOKENS = 28
CHECKPOINT_SEEDS = {"qwen3": 4, "qwen2": 4, "llama": 16, "qwen3_moe": 0, "mixtral": 12}
"""Of float32, and text that repeats itself; experts: the best 2 of 3, and the best 6 of 60."""
MIN_REPEATS = 0.05  # of less, cells that draft seldom may accept nothing


@dataclass(frozen=True)
class Asked:
    """One request of a cell."""

    prompt: list[int]
    params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()


def make_requests(vocab_size: int) -> list[Asked]:
    """Return requests of all kinds, whose prompts repeat themselves."""
    rng = random.Random(0)

    def prompt(num_motif: int, num_times: int) -> list[int]:
        motif = [rng.randrange(2, vocab_size) for _ in range(num_motif)]
        return motif * num_times + motif[: rng.randint(1, num_motif)]

    def params(**values) -> SamplingParams:
        return SamplingParams(**({"max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": rng.randrange(99)} | values))

    frequent = rng.sample(range(2, vocab_size), 3)
    eos = frozenset(frequent)
    return [
        Asked(prompt(5, 4), params(temperature=0.0)),
        Asked(prompt(4, 3), params(temperature=0.4)),
        Asked(prompt(7, 2), params(temperature=0.0, repetition_penalty=1.1, max_tokens=NUM_TOKENS - 7)),
        Asked(prompt(3, 20), params(temperature=0.6, top_k=4, top_p=0.9, min_p=0.02)),
        Asked(prompt(6, 3), params(temperature=0.0, ignore_eos=False), eos),
        Asked(prompt(2, 9), params(temperature=0.5, presence_penalty=0.4, frequency_penalty=0.2)),
        Asked(prompt(9, 4), params(temperature=0.0, logit_bias={frequent[0]: 3.0}, stop_token_ids=[frequent[1]])),
        Asked(prompt(4, 4), params(temperature=0.0), bad_words=((frequent[2],), tuple(prompt(2, 1)[:2]))),
        Asked(prompt(8, 2), params(temperature=0.3, min_tokens=12, ignore_eos=False), eos),
    ]


def run(path: Path, asked: list[Asked], **settings) -> tuple[list[Request], SchedulerStats]:
    """Return the ended requests, which arrived one after the other."""
    fixed = {"stage_num_threads": 1, "block_size": 4, "max_model_len": 160, "max_num_seqs": 8}
    engine = LocalEngine(plan_engine(EngineConfig.from_flat(str(path), **(fixed | settings)), Hardware(1)))
    requests = []
    for one in asked:
        requests.append(engine.submit(one.prompt, one.params, eos_token_ids=one.eos_token_ids))
        requests[-1].bad_word_token_ids = one.bad_words
        for _ in range(3):
            engine.step()
    while not all(request.finish_reason for request in requests):
        engine.step()
    engine.drain()
    engine.scheduler.check_integrity()
    return requests, engine.stats()


def share_of_repeats(asked: list[Asked], requests: list[Request]) -> float:
    """Return the share of generated tokens that follow the one before them as they last did, as drafts assume."""
    repeats = []
    for one, request in zip(asked, requests, strict=True):
        followers: dict[int, int] = {}
        for index, (token, follower) in enumerate(pairwise(one.prompt + request.output_token_ids), 1):
            if index >= len(one.prompt):
                repeats.append(followers.get(token) == follower)
            followers[token] = follower
    return sum(repeats) / len(repeats)


def margin(path: Path, one: Asked, output: list[int]) -> float:
    """Return by how much the next token wins against the second, for requests without penalties and bans."""
    text, params = one.prompt + output, one.params
    logits = hf_logits(path, text)[-1:].float()
    if params.temperature:
        top_k, top_p, min_p, temperature = (
            torch.tensor([value]) for value in (params.top_k, params.top_p, params.min_p, params.temperature)
        )
        logits = mask_truncated(logits, temperature, (top_k, top_p, min_p))
        logits = logits + gumbel_noise(torch.tensor([params.seed]), torch.tensor([len(text)]), logits.shape[1])
    best, second = logits[0].topk(2).values.tolist()
    return best - second


class Comparison:
    """Holds outputs against the reference's, and excuses near-ties, which must be rare."""

    def __init__(self, family: str, path: Path, asked: list[Asked], reference: list[Request]) -> None:
        self.family, self.path, self.asked, self.reference = family, path, asked, reference
        self.num_tokens = self.num_excused = 0

    def compare(self, requests: list[Request]) -> None:
        for one, expected, got in zip(self.asked, self.reference, requests, strict=True):
            outputs = expected.output_token_ids, got.output_token_ids
            self.num_tokens += len(outputs[0])
            if outputs[0] == outputs[1]:
                assert (got.finish_reason, got.stop_token_id) == (expected.finish_reason, expected.stop_token_id)
                continue
            same = next((i for i, (a, b) in enumerate(zip(*outputs, strict=False)) if a != b), None)
            assert same is not None, f"{outputs[1]} instead of {outputs[0]}"
            assert margin(self.path, one, outputs[0][:same]) < TIE_GAP, f"{outputs[1]} instead of {outputs[0]}"
            self.num_excused += 1


IN_CI = ("qwen3",)  # drafts know nothing of a family


@pytest.fixture(
    scope="module", params=[name if name in IN_CI else pytest.param(name, marks=pytest.mark.full) for name in FAMILIES]
)
def family(request, tmp_path_factory) -> Comparison:
    path = tmp_path_factory.mktemp(request.param)
    make_checkpoint(request.param, CHECKPOINT_SEEDS[request.param], path, min_layers=4)
    asked = make_requests(vocab_size=128)
    reference, stats = run(path, asked, max_num_batched_tokens=64)
    assert stats.num_draft_tokens == 0
    share = share_of_repeats(asked, reference)
    assert share > MIN_REPEATS, f"{request.param} repeats only {share:.1%} of its text: choose another seed"
    return Comparison(request.param, path, asked, reference)


def drafts_of_cell(family: str, num_stages: int) -> list[int | None]:
    turn = FAMILIES.index(family) + num_stages
    fixed = [count for count in range(1, 9) if IS_FULL or count % 8 == (2 * turn + num_stages) % 8]
    return [*fixed, None] if IS_FULL or turn % len(FAMILIES) == 0 else [*fixed]


@pytest.mark.in_ci("qwen3-1", "qwen3-3")
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_text_is_the_same_with_any_number_of_drafts(family, num_stages):
    met: Counter[str] = Counter()
    for number, num_drafts in enumerate(drafts_of_cell(family.family, num_stages)):
        requests, stats = run(
            family.path,
            family.asked,
            num_stages=num_stages,
            speculative={"method": "ngram", "min_n": 1, "num_speculative_tokens": num_drafts},
            max_num_batched_tokens=80 if number % 2 else 40,
            min_prefill_chunk_tokens=8,
            num_kv_blocks=400 if number % 3 == 2 else 42,
            mode="full" if num_drafts in (None, 2, 5, 8) else "none",
        )
        family.compare(requests)
        cell = f"{num_stages} stages, {num_drafts} drafts: {stats}"
        if num_drafts is not None:  # else it is chosen, and these short texts need not be worth it
            assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens, cell
            assert stats.acceptance_length > 1, cell
        counts = [request.draft_counts for request in requests if request.draft_counts is not None]
        assert sum(count.num_drafted for count in counts) == stats.num_draft_tokens
        met["preempted"] += stats.num_preemptions > 0
        met["chunked"] += stats.num_prefill_chunks > stats.num_prefills
        met["missed"] += stats.num_missed_rows > 0
    print(f"\n{family.num_tokens} tokens equal to those without drafts, {family.num_excused} near-ties excused; {met}")
    assert family.num_excused <= max(1, family.num_tokens // 1000)
    for what in ("preempted", "chunked", "missed"):
        assert met[what] >= 1 + IS_FULL, f"{what} was met only {met[what]} times"


@pytest.mark.in_ci("qwen3-3")
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_text_is_the_same_with_a_head(family, num_stages, tmp_path):
    """The same requests with random EAGLE heads: alone, and where n-grams do not match."""
    met: Counter[str] = Counter()
    cells = [(method, count) for method in ("eagle", "eagle3", "auto") for count in (*range(1, 9), None)]
    turn = FAMILIES.index(family.family)
    if IS_FULL:
        cells = cells[(turn + num_stages) % len(FAMILIES) :: len(FAMILIES)]
    else:  # one of them that drafts for certain, another for each family and number of stages
        cells = [cell for cell in cells if cell[1] is not None]
        cells = [cells[7 * (4 * turn + num_stages) % len(cells)]]
    for number, (method, num_drafts) in enumerate(cells, num_stages // 2):
        kind = {"auto": "eagle3_own_vocabulary"}.get(method, method)
        head = make_head(kind, family.path, tmp_path / f"head-{number}", seed=number)
        requests, stats = run(
            family.path,
            family.asked,
            num_stages=num_stages,
            speculative={"method": method, "model": str(head), "min_n": 1, "num_speculative_tokens": num_drafts},
            max_num_batched_tokens=80 if number % 2 else 40,
            min_prefill_chunk_tokens=8,
            num_kv_blocks=64 if (num_stages + number) % 2 else 400,
            mode="full" if number % 2 else "none",
        )
        family.compare(requests)
        if num_drafts is not None:
            assert stats.num_draft_tokens > stats.num_accepted_tokens, stats  # some, and not all of them right
        met["drafted"] += stats.num_draft_tokens
        met["accepted"] += stats.num_accepted_tokens
        met["preempted"] += stats.num_preemptions > 0
    print(f"\n{num_stages} stages, {len(cells)} cells, {family.num_excused} near-ties excused; {dict(met)}")
    assert family.num_excused <= max(1, family.num_tokens // 1000)
    if IS_FULL:  # of one cell's drafts none may be right: heads are random; `tiny`'s, in test_tiny_eagle.py, is not
        assert met["accepted"] > 0


def test_a_verifier_that_accepts_one_draft_too_many_is_noticed(family, monkeypatch):
    right = draft_tables.verify_drafts

    def wrong(token_ids, first, draft_ids, num_proposed, max_valid):
        verified = right(token_ids, first, draft_ids, num_proposed, max_valid)
        num_valid = torch.where(verified.num_drafted > 0, verified.num_valid + 1, verified.num_valid)
        num_valid = num_valid.clamp(max=token_ids.shape[1])
        return verified._replace(num_valid=num_valid, lengths=first + num_valid)

    monkeypatch.setattr(draft_tables, "verify_drafts", wrong)
    requests, _ = run(family.path, family.asked, speculative={"method": "ngram", "num_speculative_tokens": 3})
    with pytest.raises(AssertionError, match="instead of"):
        Comparison(family.family, family.path, family.asked, family.reference).compare(requests)

"""Every sampling parameter through the whole engine, against transformers' logits processors on transformers' logits.

Requests with all kinds of parameters share steps, on several stages, in chunks, with cached prefixes and preemptions.
What transformers has no processor for (presence and frequency) is computed here.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from exactness import TIE_GAP
from hf_models import FAMILIES, hf_logits, make_checkpoint, sizes_for_members
from sampling_reference import Case, end_token_ids, reference_scores
from sizes import IS_FULL, sized

from raypp.config.engine_config import EngineConfig
from raypp.plan.engine_plan import EnginePlan, plan_engine
from raypp.plan.hardware import Hardware
from raypp.testing import LocalEngine
from raypp.types import SamplingParams

NUM_NEW_TOKENS = sized(12, 24)
SEEDS = sized((1, 2, 3), range(len(FAMILIES)))  # each has a family, and as many stages
EOS = 1


@dataclass
class Comparison:
    """How often the engine and the reference chose alike."""

    num_tokens: int = 0
    num_excused: int = 0
    num_changed: dict[str, int] = field(default_factory=dict)  # by name of the case: tokens that its parameters changed


def _cases(vocab_size: int, seed: int) -> dict[str, Case]:
    """Return a case for every parameter, some together, and some at random."""
    rng = random.Random(seed)

    def prompt() -> list[int]:
        return [rng.randrange(2, vocab_size) for _ in range(rng.randint(1, 40))]

    def ids(count: int) -> list[int]:
        return rng.sample(range(2, vocab_size), count)

    frequent = ids(vocab_size // 4)
    alone = {
        "greedy": {},
        "repetition": {"repetition_penalty": 1.8},
        "repetition below one": {"repetition_penalty": 0.8},
        "frequency": {"frequency_penalty": 1.5},
        "presence": {"presence_penalty": 2.0},
        "negative presence": {"presence_penalty": -1.5},
        "bias": {"logit_bias": {t: rng.uniform(-4, 4) for t in frequent}},
        "allowed": {"allowed_token_ids": frequent},
        "min tokens": {"min_tokens": 9, "logit_bias": {EOS: 30.0}},
        "min tokens and stop": {"min_tokens": 9, "stop_token_ids": [5], "logit_bias": {5: 30.0}, "ignore_eos": True},
    }
    cases = {
        name: Case(prompt(), SamplingParams(**_settings(**settings)), eos={EOS}) for name, settings in alone.items()
    }
    words = tuple((t,) for t in frequent[:20]) + tuple((a, b) for a in frequent[20:34] for b in frequent[20:36])
    cases["bad words"] = Case(prompt(), SamplingParams(**_settings()), words, {EOS})
    for index in range(8):
        settings = {
            "temperature": rng.choice([0.0, 0.6, 1.2]),
            "top_k": rng.choice([0, 5, 30]),
            "top_p": rng.choice([1.0, 0.7]),
            "min_p": rng.choice([0.0, 0.1]),
            "repetition_penalty": rng.choice([1.0, 1.3]),
            "frequency_penalty": rng.choice([0.0, 0.7]),
            "presence_penalty": rng.choice([0.0, -0.4]),
            "min_tokens": rng.choice([0, 6]),
            "logit_bias": rng.choice([{}, {t: rng.uniform(-3, 3) for t in ids(12)}]),
            "allowed_token_ids": rng.choice([None, ids(vocab_size // 2)]),
            "seed": rng.getrandbits(40),
        }
        bad_words = rng.choice([(), tuple((t,) for t in ids(9)) + tuple((t, t) for t in ids(30))])
        cases[f"mixed {index}"] = Case(prompt(), SamplingParams(**_settings(**settings)), bad_words, {EOS})
    return cases


def _settings(**changed: object) -> dict:
    return {"temperature": 0.0, "seed": 7, "max_tokens": NUM_NEW_TOKENS, **changed}


def _compare(path, name: str, case: Case, output: list[int], comparison: Comparison) -> None:
    """Check each token against the reference's choice after the engine's own tokens before it."""
    known = list(case.prompt)
    ends = end_token_ids(case)
    logits = hf_logits(path, known + output)
    for index, token_id in enumerate(output):
        scores = reference_scores(logits[len(known) - 1], known, case)
        if token_id != scores.argmax():
            gap = float(scores.max() - scores[token_id])
            # A token at the edge of a truncation is as good as kept: it differs from the kept one by rounding.
            assert gap < TIE_GAP, f"{name}: token {index} is {token_id}, not {scores.argmax()}, by a gap of {gap:.2e}"
            comparison.num_excused += 1
        comparison.num_tokens += 1
        changed = comparison.num_changed.setdefault(name, 0)
        comparison.num_changed[name] = changed + int(token_id != logits[len(known) - 1].argmax())
        known.append(token_id)
        assert token_id not in ends or index + 1 == len(output)
    assert len(output) == NUM_NEW_TOKENS or output[-1] in ends


def _plan(path, seed: int, num_stages: int, count: int = 1) -> EnginePlan:
    settings = {
        "num_stages": num_stages,
        "tensor_parallel_size": count,
        "block_size": 4,
        "max_num_batched_tokens": 24,
        "min_prefill_chunk_tokens": 5,
        "enable_prefix_caching": seed % 2 == 0,
        "max_model_len": 80,
        "max_num_seqs": 9,
        "num_kv_blocks": 60,  # 240 tokens: far fewer than nine requests have
        "stage_num_threads": 1,
    }
    if seed == 1:
        settings["mode"] = "full"  # padded steps, as they are recorded on a GPU
    if seed == 2:
        settings["speculative"] = {"method": "ngram", "min_n": 1, "num_speculative_tokens": 3}
    return plan_engine(EngineConfig.from_flat(str(path), **settings), Hardware(1))


def _run(engine: LocalEngine, cases: list[Case]) -> list[list[int]]:
    requests = [
        engine.submit(case.prompt, case.params, eos_token_ids=frozenset({EOS}), bad_word_token_ids=case.bad_words)
        for case in cases
    ]
    while engine.has_unfinished:
        engine.step()
    engine.scheduler.check_integrity()
    return [request.output_token_ids for request in requests]


@pytest.mark.in_ci("1")
@pytest.mark.parametrize("count", [1, 2, *(pytest.param(n, marks=pytest.mark.full) for n in (3, 4))])
def test_every_parameter_does_what_transformers_processors_do(count, tmp_path_factory):
    """On a model of each family, each with other settings: what is sampled depends on logits alone."""
    comparison, num_preemptions, num_accepted = Comparison(), 0, 0
    for seed in SEEDS if count == 1 else sized((1, 2), range(len(FAMILIES))):
        family, num_stages = FAMILIES[seed], 1 + (seed if count == 1 else seed % 3)
        sizes = sizes_for_members(family, count, seed) if count > 1 else {}
        folder = tmp_path_factory.mktemp(f"{family}-{seed}")
        path = make_checkpoint(family, seed, folder, min_layers=num_stages, **sizes)
        plan = _plan(path, seed, num_stages, count)
        cases = _cases(plan.model.vocab_size, seed)
        engine = LocalEngine(plan)
        outputs = _run(engine, list(cases.values()))
        num_preemptions += engine.stats().num_preemptions
        num_accepted += engine.stats().num_accepted_tokens
        for (name, case), output in zip(cases.items(), outputs, strict=True):
            _compare(path, name, case, output, comparison)
    print(f"\n{comparison}, {num_preemptions} preemptions, {num_accepted} drafts accepted")
    assert comparison.num_excused <= max(1, comparison.num_tokens // 1000)
    assert num_accepted > 0
    if count > 1 and not IS_FULL:
        return  # of two models, which do not meet all corners
    assert num_preemptions > 0
    for name, num_changed in comparison.num_changed.items():
        assert name == "greedy" or num_changed > 0, f"{name} changed nothing"
    assert comparison.num_changed["greedy"] == 0


def test_the_batch_does_not_change_a_requests_tokens(tmp_path):
    path = make_checkpoint("qwen3", 0, tmp_path, min_layers=3)
    plan = _plan(path, 0, num_stages=3)
    cases = list(_cases(plan.model.vocab_size, 3).values())
    together = _run(LocalEngine(plan), cases)
    for index in range(0, len(cases), sized(9, 4)):
        assert _run(LocalEngine(plan), [cases[index]]) == [together[index]]
    rng = random.Random(0)
    for _ in range(sized(1, 2)):
        order = rng.sample(range(len(cases)), rng.randint(2, len(cases)))
        assert _run(LocalEngine(plan), [cases[i] for i in order]) == [together[i] for i in order]

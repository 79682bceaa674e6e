"""Texts under grammars: all of them follow theirs and end by themselves, and nothing else changes them.

`TEST_STRUCTURED_SCHEMAS=all` takes every schema in every cell; CI takes some in two.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import jsonschema
import pytest
import torch
from structured_schemas import SCHEMAS

from raypp.api.tokenizer import Tokenizer
from raypp.config.engine_config import EngineConfig
from raypp.errors import RequestError
from raypp.ops.row_tokens import StepTokens
from raypp.plan.engine_plan import EnginePlan, plan_engine
from raypp.plan.hardware import Hardware
from raypp.request import Request
from raypp.specdec.eagle import EagleProposer
from raypp.specdec.proposer import Drafts, Followed, StepHidden
from raypp.testing import LocalEngine
from raypp.types import FinishReason, SamplingParams

ALL = os.environ.get("TEST_STRUCTURED_SCHEMAS") == "all"
NGRAM = {"speculative": {"method": "ngram", "num_speculative_tokens": 4}}
HEAD = {"method": "auto", "model": "tiny-eagle3", "num_speculative_tokens": 3}
CELLS = list(itertools.product((1, 3), ({}, NGRAM))) if ALL else [(1, {}), (3, NGRAM)]
NAMES = list(SCHEMAS) if ALL else list(SCHEMAS)[::10]
PROMPTS = ("def main(", "import json\n\nvalue = ", '{"name": "foo", "n": 1}\n', "<|im_start|>user\nhello<|im_end|>\n")


def plan_of(**settings: Any) -> EnginePlan:
    fixed = {"stage_num_threads": 1, "max_num_seqs": 32}
    return plan_engine(EngineConfig.from_flat("tiny", **(fixed | settings)), Hardware(1))


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(plan_of().model_path)


def run(
    all_params: Sequence[SamplingParams], *, mask_lateness: random.Random | None = None, **settings: Any
) -> list[Request]:
    """Return the ended requests, of prompts in turn; some arrive while others run."""
    plan = plan_of(**settings)
    engine = LocalEngine(plan, mask_lateness=mask_lateness)
    requests = []
    for index, params in enumerate(all_params):
        [prompt] = tokenizer().encode([PROMPTS[index % len(PROMPTS)]])
        requests.append(engine.submit(prompt, params, eos_token_ids=frozenset(plan.model.eos_token_ids)))
        if index % 7 == 0:
            engine.step()
    while engine.has_unfinished:
        engine.step()
    engine.drain()
    engine.scheduler.check_integrity()
    return requests


def text_of(request: Request) -> str:
    assert request.finish_reason is FinishReason.STOP, tokenizer().decode(request.output_token_ids)
    return tokenizer().decode(request.output_token_ids)


def constrained(constraint: dict[str, Any], seed: int, temperature: float, **values: Any) -> SamplingParams:
    values = {"max_tokens": 400, "temperature": temperature, "seed": seed} | values
    return SamplingParams(structured_outputs=constraint, **values)


def test_there_are_schemas_enough() -> None:
    assert len(SCHEMAS) >= 60
    assert len({json.dumps(schema, sort_keys=True) for schema in SCHEMAS.values()}) == len(SCHEMAS)


def test_every_text_validates_and_ends_and_speculation_changes_none() -> None:
    asked = [(name, temperature) for name in NAMES for temperature in (0.0, 1.0)]
    params = [constrained({"json_schema": SCHEMAS[name]}, seed, t) for seed, (name, t) in enumerate(asked)]
    first: list[str] | None = None
    for num_stages, speculation in CELLS:
        requests = run(params, num_stages=num_stages, **speculation)
        texts = [text_of(request) for request in requests]
        for (name, temperature), text in zip(asked, texts, strict=True):
            try:
                jsonschema.Draft202012Validator(SCHEMAS[name]).validate(json.loads(text))
            except (ValueError, jsonschema.ValidationError) as error:
                raise AssertionError(f"{name} at temperature {temperature}: {text!r}") from error
        first = first or texts
        assert texts == first, f"{num_stages} stages, {speculation}"
        num_accepted = sum(sum(r.draft_counts.accepted_by_position) for r in requests if r.draft_counts is not None)
        num_tokens = sum(len(request.output_token_ids) for request in requests)
        drafted = f"{num_tokens} tokens, {num_accepted} of them drafts"
        print(f"{num_stages} stages, {speculation or 'no speculation'}: {len(texts)} texts, {drafted}")


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "a single text": ({"regex": "exactly this, nothing else"}, "exactly this, nothing else"),
    "a single choice": ({"choice": ['a "quoted"\ttext\\ é\n']}, re.escape('a "quoted"\ttext\\ é\n')),
    "a single grammar": ({"grammar": 'root ::= "ab" (c | c) "d"\nc ::= "c"'}, "abcd"),
    "regex": ({"regex": r"[A-Z][a-z]{2,7}( [a-z]{1,5}){0,2}\."}, r"[A-Z][a-z]{2,7}( [a-z]{1,5}){0,2}\."),
    "regex with choices": ({"regex": r"(yes|no|maybe): \d{1,3}%"}, r"(yes|no|maybe): \d{1,3}%"),
    "choice": ({"choice": ["positive", "negative", "neutral"]}, "positive|negative|neutral"),
    "choices that begin alike": ({"choice": ["a", "ab", "abc"]}, "a|ab|abc"),
    "grammar": (
        {"grammar": 'root ::= term (" + " term){0,2}\nterm ::= [0-9]{1,2} | "(" [0-9] ")"'},
        r"([0-9]{1,2}|\([0-9]\))( \+ ([0-9]{1,2}|\([0-9]\))){0,2}",
    ),
}


def test_regex_choice_and_grammar() -> None:
    params = [constrained(c, seed, t) for seed, (c, _) in enumerate(OTHERS.values()) for t in (0.0, 1.0)]
    patterns = [pattern for _, pattern in OTHERS.values() for _ in range(2)]
    first: list[str] | None = None
    for num_stages, speculation in CELLS:
        texts = [text_of(request) for request in run(params, num_stages=num_stages, **speculation)]
        for pattern, text in zip(patterns, texts, strict=True):
            assert re.fullmatch(pattern, text), f"{text!r} for {pattern!r}"
        first = first or texts
        assert texts == first


def test_any_json_object() -> None:
    [request] = run([constrained({"json_object": True}, 0, 0.0)])
    assert isinstance(json.loads(text_of(request)), dict)


def every_kind_of_params() -> list[SamplingParams]:
    """Return requests with every sampling parameter, under a grammar and, in between, free."""
    schema = {"json_schema": SCHEMAS["extraction"]}
    comma = int(tokenizer().encode([","])[0][0])
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"top_p": 0.8, "top_k": 20, "min_p": 0.01},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
        {"logit_bias": {comma: 5.0}, "logprobs": 3, "prompt_logprobs": 1},
        {"min_tokens": 30, "bad_words": ["name"]},
        {"allowed_token_ids": [comma], "temperature": 0.0},
        {"stop": ["certain"], "priority": 0},
    ]
    params = []
    for seed, values in enumerate(kinds):
        values = {"max_tokens": 300, "seed": seed} | {k: v for k, v in values.items() if k != "priority"}
        params.append(SamplingParams(structured_outputs=schema, **values))
        params.append(SamplingParams(**(values | {"max_tokens": 40, "ignore_eos": True, "min_tokens": 0})))
    return params


@pytest.mark.parametrize(
    "settings",
    [
        {"num_stages": 2, "num_kv_blocks": 30, "max_model_len": 400, "block_size": 16, **NGRAM},
        pytest.param({"num_stages": 2, "mode": "full", **NGRAM}, marks=pytest.mark.full),
        pytest.param(
            {"num_stages": 2, "num_kv_blocks": 30, "max_model_len": 400, "mask_lateness": random.Random(3)},
            marks=pytest.mark.full,
        ),
        pytest.param(
            {"num_stages": 2, "mode": "full", "mask_lateness": random.Random(4), "speculative": HEAD},
            marks=pytest.mark.full,
        ),
    ],
    ids=["preemption", "recorded", "late masks and preemption", "a head and late masks"],
)
def test_with_every_sampling_parameter(settings: dict[str, Any], plain: list[list[int]]) -> None:
    requests = run(every_kind_of_params(), **settings)
    assert [request.output_token_ids for request in requests] == plain
    if "num_kv_blocks" in settings:
        assert sum(request.num_preemptions for request in requests) > 0


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    """The outputs on one stage without anything that could change them."""
    requests = run(every_kind_of_params())
    for request in requests[::2]:
        jsonschema.validate(json.loads(text_of(request)), SCHEMAS["extraction"])
    return [request.output_token_ids for request in requests]


@pytest.mark.full
def test_late_masks_cost_steps_and_change_nothing() -> None:
    free = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)  # with it, nobody waits for a mask
    names = ("extraction", "tuple", "matrix")
    params = [free, *(constrained({"json_schema": SCHEMAS[name]}, 5, 1.0) for name in names)]
    expected = [request.output_token_ids for request in run(params)]
    for num_stages, speculation in ((1, {}), (3, NGRAM)):
        late = run(params, num_stages=num_stages, mask_lateness=random.Random(num_stages), **speculation)
        assert [request.output_token_ids for request in late] == expected


def test_a_late_mask_leaves_what_a_head_has_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in front of a row's newest token may be shared with others."""
    newest: list[int] = []
    num_repeated = 0
    follow, propose = EagleProposer.follow, EagleProposer.propose

    def followed(proposer: EagleProposer, tokens: StepTokens, hidden: StepHidden) -> Followed:
        first = hidden.positions[hidden.token_indices[:: tokens.token_ids.shape[1]]]
        kept = torch.ones_like(first) if tokens.num_valid is None else tokens.num_valid
        newest[:] = (first + (kept - 1).clamp(min=0)).tolist()
        return follow(proposer, tokens, hidden)

    def proposed(proposer: EagleProposer, tokens: StepTokens, made: Followed, max_length: int, most: int) -> Drafts:
        nonlocal num_repeated
        [row] = tokens.rows.tolist()
        num_repeated += newest[0] > int(tokens.lengths[0]) - 2
        size, blocks = proposer._cache.keys.shape[2], proposer._block_tables[0, row]
        slots = [(int(blocks[position // size]), position % size) for position in range(newest[0])]
        before = [[side[block, :, place].clone() for side in proposer._cache] for block, place in slots]
        drafts = propose(proposer, tokens, made, max_length, most)
        for (block, place), states in zip(slots, before, strict=True):
            for side, kept in zip(proposer._cache, states, strict=True):
                assert torch.equal(side[block, :, place], kept), (newest, place)
        return drafts

    monkeypatch.setattr(EagleProposer, "follow", followed)
    monkeypatch.setattr(EagleProposer, "propose", proposed)
    params = [constrained({"json_schema": SCHEMAS["extraction"]}, 5, 1.0)]
    run(params, mask_lateness=random.Random(1), speculative={**HEAD, "method": "eagle3"})
    assert num_repeated > 3


def run_to_the_end(engine: LocalEngine) -> None:
    while engine.has_unfinished:
        engine.step()


def test_what_cannot_be_followed_is_refused_and_the_others_go_on() -> None:
    plan = plan_of()
    engine = LocalEngine(plan)
    eos = frozenset(plan.model.eos_token_ids)
    other = engine.submit([5, 6, 7], SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True), eos_token_ids=eos)
    bad = engine.submit([5, 6, 7], constrained({"json_schema": {"type": "nonsense"}}, 0, 0.0), eos_token_ids=eos)
    with pytest.raises(RequestError, match="nonsense"):
        run_to_the_end(engine)
    while engine.has_unfinished:
        engine.step()
    assert len(other.output_token_ids) == 20
    assert not bad.output_token_ids


def test_an_aborted_request_leaves_nothing_behind() -> None:
    plan = plan_of(num_stages=2)
    engine = LocalEngine(plan)
    params = constrained({"json_schema": SCHEMAS["extraction"]}, 0, 1.0)
    request = engine.submit([5, 6, 7], params, eos_token_ids=frozenset(plan.model.eos_token_ids))
    assert engine.abort(request)  # while its grammar is compiled
    request = engine.submit([5, 6, 7], params, eos_token_ids=frozenset(plan.model.eos_token_ids))
    for _ in range(6):
        engine.step()
    assert request.output_token_ids
    assert engine.abort(request)
    engine.drain()
    assert not engine.has_unfinished
    assert engine.stats().num_free_blocks == engine.stats().num_blocks - 1

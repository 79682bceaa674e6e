"""Decode steps with any parameters are recordings."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from op_tape import spoiling_tape_graphs, tape_graphs

from raypp.config.engine_config import EngineConfig
from raypp.graphs.graph_manager import CudaGraphManager
from raypp.messages import Unrecorded
from raypp.plan.engine_plan import EnginePlan, plan_engine
from raypp.plan.graph_plan import graph_spec
from raypp.plan.hardware import Hardware
from raypp.sampling_params import MAX_BIASED_TOKENS
from raypp.stage.full_graphs import FullGraphs
from raypp.stage.step_sizes import StepPadding
from raypp.testing import LocalEngine, build_local_pipeline
from raypp.tracing import ForwardCounter
from raypp.types import SamplingParams

KINDS = (
    {"temperature": 0.0, "presence_penalty": 0.6, "frequency_penalty": 0.3},
    {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.3, "logprobs": 2},
    {"temperature": 0.7, "logit_bias": {40: 3.0, 41: -2.0}, "min_tokens": 4},
    {"temperature": 0.0},
    {"temperature": 0.8, "allowed_token_ids": list(range(30, 200)), "top_k": 12},
    {"temperature": 0.0, "min_tokens": 6, "stop_token_ids": [9, 10]},
)
BAD_WORDS = ((45,), (60, 61), (99, 45, 80))
SPECULATION = {"speculative": {"method": "ngram", "num_speculative_tokens": 2}}


def _requests(count: int) -> list[tuple[list[int], SamplingParams]]:
    return [
        (
            [5 + i, 80 + i, 99, 120 + 3 * i] * (2 + i % 4),
            SamplingParams(max_tokens=8 + i % 5, seed=i, ignore_eos=i % 2 == 0, **KINDS[i % len(KINDS)]),
        )
        for i in range(count)
    ]


def _generate(engine: LocalEngine, requests, eos_token_ids=frozenset()) -> list[list[int]]:
    """Run them, more than there are rows; every third has bad words."""
    running = [
        engine.submit(
            prompt,
            params,
            eos_token_ids=eos_token_ids if params.structured_outputs else frozenset(),
            bad_word_token_ids=BAD_WORDS if index % 3 == 0 and not params.structured_outputs else (),
        )
        for index, (prompt, params) in enumerate(requests)
    ]
    while engine.has_unfinished:
        engine.step()
    return [request.output_token_ids for request in running]


def engine_plan(**settings: object) -> EnginePlan:
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 4, "max_model_len": 96}
    return plan_engine(EngineConfig.from_flat("tiny", **(sizes | settings)), Hardware(1))


def _engine(make_graphs=None, mask_lateness: random.Random | None = None, **settings: object) -> LocalEngine:
    plan = engine_plan(**settings)
    pipeline = build_local_pipeline(plan, make_graphs=make_graphs)
    return LocalEngine(plan, pipeline=pipeline, mask_lateness=mask_lateness)


@pytest.fixture
def tails(monkeypatch):
    """The tails that ran operation by operation, by their needs; recording runs them, too."""
    ran, tail = [], FullGraphs._tail

    def noted(self, batch, inputs):
        ran.append(inputs)
        return tail(self, batch, inputs)

    monkeypatch.setattr(FullGraphs, "_tail", noted)
    return ran


@pytest.mark.parametrize("settings", [{}, SPECULATION], ids=["plain", "drafts"])
def test_replays_choose_the_same(tails, settings):
    """On tapes that spoil each other's memory."""
    requests = _requests(9)
    expected = _generate(_engine(mode="none", **settings), requests)
    engine = _engine(spoiling_tape_graphs, mode="full", **settings)
    tails.clear()
    assert _generate(engine, requests) == expected
    assert not tails


def test_reports_are_recorded_where_requests_may_ask_for_log_probabilities(monkeypatch):
    """Of a request's own tokens, which it may always ask for, they are made step by step otherwise."""
    recorded, record = [], CudaGraphManager.record

    def noted(self, mode, key, *args, **kwargs):
        recorded.append(key[0])
        return record(self, mode, key, *args, **kwargs)

    monkeypatch.setattr(CudaGraphManager, "record", noted)
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=0)
    found = []
    for max_logprobs in (20, 0):
        recorded.clear()
        engine = _engine(tape_graphs, mode="full", max_logprobs=max_logprobs)
        assert ("report" in recorded) == (max_logprobs > 0)
        engine.submit([5, 80, 99], params)
        updates = [update for _ in range(20) for update in engine.step()]
        found.append(np.concatenate([each.logprobs.own.logprobs for each in updates if each.logprobs is not None]))
    assert found[0].shape == (6, 1)
    np.testing.assert_array_equal(*found)
    planned = [graph_spec(engine_plan(max_logprobs=most).config, engine_plan().model, "cuda", 2) for most in (20, 0)]
    assert planned[0].planned_bytes > planned[1].planned_bytes


def test_debug_mode_agrees():
    engine = _engine(tape_graphs, mode="full", debug_every=2, **SPECULATION)
    requests = _requests(6)
    assert _generate(engine, requests) == _generate(_engine(mode="none", **SPECULATION), requests)


def test_the_largest_request_is_a_recording_too(tails):
    engine, plain = _engine(tape_graphs, mode="full"), _engine(mode="none")
    tails.clear()
    bias = {token_id: token_id % 7 - 3.0 for token_id in range(MAX_BIASED_TOKENS)}
    assert engine_plan().model.vocab_size > len(bias)
    large = [([7, 8, 9], SamplingParams(max_tokens=9, temperature=0.7, seed=3, logit_bias=bias, ignore_eos=True))]
    assert _generate(engine, large) == _generate(plain, large)
    assert not tails
    requests = _requests(4)
    assert _generate(engine, requests) == _generate(plain, requests)


def test_steps_without_a_recording_are_counted_with_why(monkeypatch):
    noted = set()
    monkeypatch.setattr(ForwardCounter, "add_unrecorded", lambda self, why: noted.add(why))
    requests = _requests(6)
    _generate(_engine(tape_graphs, mode="full_and_piecewise", **SPECULATION), requests)
    assert not noted
    _generate(_engine(tape_graphs, mode="full"), requests)
    assert noted == {Unrecorded.TOKENS}, "only prompts have no recording"
    engine = _engine(tape_graphs, mode="full_and_piecewise")
    with monkeypatch.context() as patched:
        patched.setattr(CudaGraphManager, "__contains__", lambda self, key: key[0] != "tail")
        _generate(engine, requests)
    assert noted == {Unrecorded.TOKENS, Unrecorded.CHOICE}
    engine, size_of = _engine(tape_graphs, mode="full_and_piecewise"), StepPadding.size_of
    monkeypatch.setattr(StepPadding, "size_of", lambda self, plan: size_of(self, replace(plan, num_drafts=99)))
    _generate(engine, requests)
    assert noted == set(Unrecorded)
    noted.clear()
    _generate(_engine(mode="full_and_piecewise"), requests)
    assert not noted, "nobody makes graphs here"


@pytest.mark.parametrize(
    "settings", [pytest.param({}, id="plain", marks=pytest.mark.full), pytest.param(SPECULATION, id="drafts")]
)
def test_rows_under_a_grammar(tails, settings):
    """Beside free rows, with masks that come late; the texts are those of the plain engine."""
    patterns = ("(ab){9,12}", "(yes|no|maybe so)( and (yes|no)){0,4}", '\\{"a": [0-9]{1,6}\\}')
    requests = []
    for index, (prompt, params) in enumerate(_requests(6)):
        if index % 5 < 3:
            values = ({}, {"presence_penalty": 0.5}, {"top_p": 0.9})[index % 3]
            params = SamplingParams(
                max_tokens=20,
                temperature=0.5 * (index % 3),
                seed=index,
                structured_outputs={"regex": patterns[index % 5]},
                **values,
            )
        requests.append((prompt, params))
    eos_token_ids = frozenset(engine_plan().model.eos_token_ids)
    plain = _engine(mode="none", **settings)
    expected = _generate(plain, requests, eos_token_ids)
    engine = _engine(spoiling_tape_graphs, mode="full", **settings)
    tails.clear()
    assert _generate(engine, requests, eos_token_ids) == expected
    assert not tails
    assert engine.stats().num_accepted_tokens == plain.stats().num_accepted_tokens
    if settings:
        assert engine.stats().num_accepted_tokens > 5  # the driver was told the drafts, so there were masks behind them
    late = _engine(tape_graphs, mask_lateness=random.Random(5), mode="full", debug_every=3, **settings)
    assert _generate(late, requests, eos_token_ids) == expected

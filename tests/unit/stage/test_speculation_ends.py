"""Ends inside accepted drafts cut exactly there. The model is a fake that counts up, so drafts of a match are right."""

from __future__ import annotations

import random

import pytest
from sizes import sized

from raypp.config.engine_config import EngineConfig
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.request import Request
from raypp.testing import FakeStage, LocalEngine
from raypp.types import FinishReason, SamplingParams

PROMPT = [*range(10, 60), 10, 11, 12]  # what follows 12 was seen before: 13, 14, ... are drafted, and right


def make_engine(num_drafts: int | None, num_stages: int = 1, **settings) -> LocalEngine:
    speculative = {"method": "ngram", "num_speculative_tokens": num_drafts} if num_drafts else {}
    fixed = {"stage_num_threads": 1, "max_model_len": 128, "max_num_seqs": 4, "block_size": 4, "num_kv_blocks": 800}
    config = EngineConfig.from_flat("tiny", num_stages=num_stages, speculative=speculative, **(fixed | settings))
    return LocalEngine(plan_engine(config, Hardware(1)), FakeStage(step_ms=0))


def finish(engine: LocalEngine, *requests: Request) -> None:
    while not all(request.finish_reason for request in requests):
        engine.step()
    engine.drain()
    engine.scheduler.check_integrity()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_in_flight) == (0, 0, 0)
    assert stats.num_free_blocks == stats.num_blocks - 1


@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("num_drafts", sized((1, 3, 8), range(1, 9)))
def test_every_place_of_an_end_is_met(num_drafts, num_stages):
    engine = make_engine(num_drafts, num_stages)
    for length in range(1, num_drafts + 4):
        expected = list(range(13, 13 + length))
        for end in ("eos", "stop", "length"):
            params = SamplingParams(
                max_tokens=length if end == "length" else 40,
                temperature=0.0,
                stop_token_ids=[expected[-1]] if end == "stop" else [],
            )
            eos = frozenset({expected[-1]}) if end == "eos" else frozenset()
            request = engine.submit(PROMPT, params, eos_token_ids=eos)
            finish(engine, request)
            assert request.output_token_ids == expected
            assert request.finish_reason == (FinishReason.LENGTH if end == "length" else FinishReason.STOP)
            assert request.stop_token_id == (expected[-1] if end == "stop" else -1)
    stats = engine.stats()
    assert stats.acceptance_length > 1 + 0.4 * num_drafts, "drafts are hardly ever accepted: nothing is cut"


def test_a_row_ends_at_the_models_length_whatever_is_drafted():
    for num_drafts in (1, 3, 8):
        engine = make_engine(num_drafts, num_stages=2, max_model_len=64)
        request = engine.submit(PROMPT, SamplingParams(max_tokens=1000, temperature=0.0, ignore_eos=True))
        finish(engine, request)
        assert request.output_token_ids == list(range(13, 13 + 64 - len(PROMPT)))


def test_speculating_takes_fewer_steps():
    num_steps = {}
    for num_drafts in (None, 4):
        engine = make_engine(num_drafts, num_stages=2)
        finish(engine, engine.submit(PROMPT, SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)))
        num_steps[num_drafts] = engine.stats().num_steps
    assert num_steps[4] < num_steps[None] / 2.5


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_aborts_at_any_moment_leave_the_others_alone(num_stages):
    rng = random.Random(num_stages)
    engine = make_engine(5, num_stages, num_kv_blocks=36)
    running: list[Request] = []
    ended = num_aborted = 0
    for _ in range(400):
        if len(running) < 6 and rng.random() < 0.3:
            start = rng.randint(1, 40)
            prompt = PROMPT[:start] + PROMPT[: rng.randint(2, 9)]
            running.append(engine.submit(prompt, SamplingParams(max_tokens=rng.randint(1, 60), temperature=0.0)))
        if running and rng.random() < 0.1:
            victim = rng.choice(running)
            num_aborted += engine.scheduler.abort(victim.request_id)
        engine.step()
        engine.scheduler.check_integrity()
        for request in [request for request in running if request.finish_reason]:
            running.remove(request)
            first = request.prompt_token_ids[-1] + 1
            assert request.output_token_ids == list(range(first, first + len(request.output_token_ids)))
            ended += 1
    finish(engine, *running)
    stats = engine.stats()
    assert ended > 20
    assert num_aborted > 5
    assert stats.num_accepted_tokens > 100
    assert stats.num_preemptions > 0


def test_drafts_do_not_preempt():
    """Blocks for drafts that may never be accepted are not taken from requests: without room there are no drafts."""
    engine = make_engine(8, num_kv_blocks=1 + 32, max_num_seqs=2)
    requests = [
        engine.submit(PROMPT[: 40 + i], SamplingParams(max_tokens=64 - 40 - i, temperature=0.0, ignore_eos=True))
        for i in range(2)
    ]
    finish(engine, *requests)
    assert engine.stats().num_preemptions == 0


@pytest.mark.parametrize("rate", [0.0, 0.7, 1.0])
def test_forced_acceptance_has_its_rate_on_text_that_repeats_nothing(rate, caplog):
    engine = make_engine(4, forced_acceptance_rate=rate, max_model_len=1024)
    assert "nonsense" in caplog.text
    params = SamplingParams(max_tokens=900, temperature=0.0, ignore_eos=True)
    requests = [engine.submit([first], params) for first in (100, 2000, 3000)]
    finish(engine, *requests)
    assert [len(request.output_token_ids) for request in requests] == [900] * 3
    stats = engine.stats()
    assert stats.num_missed_rows == 0
    for place in range(4):
        accepted = stats.accepted_by_position[place] / stats.drafted_by_position[place]
        assert accepted == pytest.approx(rate ** (place + 1), abs=0.06)


def test_speculation_is_exact_unless_it_is_forced(caplog):
    engine = make_engine(4)
    assert not caplog.text
    request = engine.submit([100], SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True))
    finish(engine, request)
    assert request.output_token_ids == list(range(101, 151))

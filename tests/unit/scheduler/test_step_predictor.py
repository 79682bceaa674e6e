"""How long steps will take, and how that is learned."""

import random
import statistics

import pytest

from raypp.scheduler.step_budget import (
    RooflineCost,
    StageTimes,
    StepPredictor,
    StepWork,
    amounts,
    prompt_pairs,
    step_ms,
)

ROOFLINE = RooflineCost(100.0)
ESTIMATE = StageTimes(step=0.3, prompts=0.3, weights=2.0, token=0.001, logit=0.005, kv=2e-5, pair=5e-7)
TRUTH = StageTimes(step=0.9, prompts=0.1, weights=1.5, token=0.006, logit=0.02, kv=1e-5, pair=4e-6)


def decode(num_rows: int, context: int) -> StepWork:
    return StepWork(num_rows, num_rows, num_rows * context, num_logits=num_rows)


def with_prompt(work: StepWork, start: int, num_tokens: int) -> StepWork:
    return work._replace(num_prompt_tokens=num_tokens, num_prompt_pairs=prompt_pairs(start, num_tokens))


def some_work(rng: random.Random) -> StepWork:
    work = decode(rng.randint(0, 64), rng.randint(10, 2000))
    return work if rng.random() < 0.6 else with_prompt(work, rng.randint(0, 8000), rng.randint(1, 1000))


def test_the_slowest_stage_counts():
    faster = StageTimes(*(part / 2 for part in ESTIMATE))
    predictor = StepPredictor(ROOFLINE, [faster, ESTIMATE, faster])
    work = with_prompt(decode(4, 100), 50, 300)
    assert predictor.ms(work) == predictor.stage_ms(1, work) == 2 * predictor.stage_ms(0, work)
    pairs = 300 * 50 + 300 * 301 // 2
    expected = 0.3 + 0.3 + 2.0 * ROOFLINE(304) + 0.304 + 4 * 0.005 + 400 * 2e-5 + pairs * 5e-7
    assert predictor.ms(work) == pytest.approx(expected)


@pytest.mark.parametrize("unit", [1.0, 1e3, 1e-3])
def test_it_learns_what_a_machine_does_whatever_unit_it_began_with(unit):
    rng = random.Random(0)
    predictor = StepPredictor(ROOFLINE, [StageTimes(*(part * unit for part in ESTIMATE))])
    for _ in range(60):
        works = [some_work(rng) for _ in range(12)]
        noise = [rng.choice([0.97, 1.0, 1.0, 1.02, 1.4]) for _ in works]
        predictor.learn(0, works, [step_ms(TRUTH, amounts(w, ROOFLINE)) * n for w, n in zip(works, noise, strict=True)])
    errors = []
    for _ in range(300):
        work = some_work(rng)
        errors.append(abs(predictor.ms(work) / step_ms(TRUTH, amounts(work, ROOFLINE)) - 1))
    assert statistics.median(errors) < 0.07
    assert max(errors) < 0.25


def test_a_few_steps_tell_how_fast_the_machine_is():
    predictor = StepPredictor(ROOFLINE, [ESTIMATE])
    slow = StageTimes(*(part * 20 for part in ESTIMATE))
    works = [decode(8, 100), decode(3, 40)]
    predictor.learn(0, works * 3, [step_ms(slow, amounts(work, ROOFLINE)) for work in works] * 3)
    unseen = with_prompt(decode(8, 100), 0, 500)
    assert predictor.ms(unseen) == pytest.approx(step_ms(slow, amounts(unseen, ROOFLINE)), rel=0.05)


@pytest.mark.parametrize(("most_start", "rel"), [(0, 0.1), (8000, 0.15)])
def test_prompts_are_not_forgotten_while_rows_decode(most_start, rel):
    """Deep in a prompt most of the time is its pairs', of which steps that only decode say nothing."""
    rng = random.Random(1)
    predictor = StepPredictor(ROOFLINE, [ESTIMATE])
    prompts = [
        with_prompt(decode(rng.randint(0, 9), 300), rng.randint(0, most_start), rng.randint(1, 900)) for _ in range(200)
    ]
    predictor.learn(0, prompts, [step_ms(TRUTH, amounts(work, ROOFLINE)) for work in prompts])
    rows = [decode(rng.randint(1, 64), rng.randint(10, 2000)) for _ in range(5000)]
    predictor.learn(0, rows, [step_ms(TRUTH, amounts(work, ROOFLINE)) for work in rows])
    for work in prompts:
        assert predictor.ms(work) == pytest.approx(step_ms(TRUTH, amounts(work, ROOFLINE)), rel=rel)


def test_no_part_takes_less_than_nothing_and_no_time_says_nothing():
    predictor = StepPredictor(ROOFLINE, [ESTIMATE])
    predictor.learn(0, [decode(1, 10), decode(64, 10), decode(1, 5000)], [5.0, 1.0, 0.0])
    assert all(part >= 0 for part in predictor.stages[0])
    assert predictor.ms(decode(1, 10)) > 0
    untaught = StepPredictor(ROOFLINE, [ESTIMATE])
    untaught.learn(0, [], [])
    assert untaught.stages == [ESTIMATE]

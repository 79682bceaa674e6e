"""K follows what is accepted and what a step costs. Rows are simulated: every draft is right with some probability."""

from __future__ import annotations

import random

import numpy as np
import pytest
from sizes import sized

from raypp.scheduler.drafts import AdaptiveDrafts
from raypp.scheduler.step_budget import RooflineCost

LADDER = (0, 2, 4, 8)
GPU = RooflineCost(184)


class Cohort:
    """Rows whose drafts are accepted at a rate, each given that all before it were."""

    def __init__(self, policy: AdaptiveDrafts, num_rows: int = 1, index: int = 0, seed: int = 0, shadow_every=1):
        self.policy, self.num_rows, self.index, self.rng = policy, num_rows, index, random.Random(seed)
        self.chosen: list[int] = []
        self.shadow_every, self.num_plain = shadow_every, 0
        self.num_tokens = 0
        self.time = 0.0

    def step(self, rate: float, hit_rate: float = 1.0, num_steps: int = 1, cost=GPU, most: int = 8) -> None:
        for _ in range(num_steps):
            num_drafts = self.policy.num_drafts(self.index, self.num_rows, most)
            self.chosen.append(num_drafts)
            compared = max(num_drafts, 1)
            drafted = np.array([compared * (self.rng.random() < hit_rate) for _ in range(self.num_rows)], np.int32)
            matched = np.array([self._matched(count, rate) for count in drafted], np.int32)
            self.num_plain = 0 if num_drafts else self.num_plain + 1
            if self.num_plain % self.shadow_every == 0:
                self.policy.note_result(self.index, num_drafts, drafted, matched)
            self.num_tokens += self.num_rows + int(matched.sum() if num_drafts else 0)
            self.time += cost(self.num_rows * (1 + num_drafts))

    def _matched(self, drafted: int, rate: float) -> int:
        return next((i for i in range(drafted) if self.rng.random() >= rate), drafted)

    @property
    def speed(self) -> float:
        return self.num_tokens / self.time


def policy(cost=GPU, num_cohorts: int = 1, ladder=LADDER) -> AdaptiveDrafts:
    return AdaptiveDrafts(ladder, num_cohorts, cost)


def test_nothing_is_drafted_before_anything_matched():
    cohort = Cohort(policy())
    cohort.step(rate=0.0, num_steps=500)
    assert set(cohort.chosen) == {0}


@pytest.mark.parametrize("num_rows", [1, 8, 64])
def test_repetitive_text_is_drafted_far_and_text_that_ends_it_not_at_all(num_rows):
    cohort = Cohort(policy(), num_rows)
    cohort.step(rate=0.95, num_steps=100)
    assert cohort.chosen[-1] >= 4
    cohort.step(rate=0.0, num_steps=100)
    assert cohort.chosen[-1] == 0


def test_after_500_tokens_without_a_match_repetitive_text_is_speculated_on_within_64_tokens():
    for seed in range(20):
        cohort = Cohort(policy(), seed=seed, shadow_every=1 + 3 * (seed % 2))
        cohort.step(rate=0.0, hit_rate=0.0, num_steps=500)
        num_tokens = cohort.num_tokens
        while not cohort.chosen[-1]:
            cohort.step(rate=0.8)
            assert cohort.num_tokens - num_tokens <= 64


@pytest.mark.parametrize("rate", [0.0, 0.2, 0.4, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("num_rows", sized([1, 32], [1, 8, 32, 128]))
@pytest.mark.parametrize("hit_rate", [1.0, 0.3])
def test_it_is_about_as_fast_as_the_best_fixed_k_and_hardly_ever_slower_than_none(rate, num_rows, hit_rate):
    speeds = {}
    for num_drafts in (*LADDER, None):
        ladder = LADDER if num_drafts is None else (0, num_drafts) if num_drafts else (0,)
        cohort = Cohort(policy(ladder=ladder), num_rows)
        if num_drafts:
            cohort.policy.num_drafts = lambda *_, count=num_drafts: count
        cohort.step(rate, hit_rate, num_steps=600)
        speeds[num_drafts] = cohort.speed
    assert speeds[None] >= 0.97 * speeds[0]
    assert speeds[None] >= 0.88 * max(speeds.values())


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.3, 0.7])
@pytest.mark.parametrize("num_rows", sized([16], [1, 16, 64]))
def test_drafts_of_models_with_experts_hardly_ever_make_them_slower(rate, num_rows):
    """A step reads the more experts the more tokens it has: costs are about those of Qwen3-30B-A3B in bfloat16."""
    cost = RooflineCost(130, expert_time=6.0, chosen_share=8 / 128)
    with_drafts, without = (Cohort(policy(cost, ladder=ladder), num_rows) for ladder in (LADDER, (0,)))
    for cohort in (with_drafts, without):
        cohort.step(rate, num_steps=600, cost=cost)
    assert with_drafts.speed >= 0.97 * without.speed
    if rate == 0:
        assert set(with_drafts.chosen) == {0}
    if rate == 0.7:
        assert with_drafts.speed >= 1.2 * without.speed


def test_many_rows_that_pay_for_every_token_draft_less():
    few, many = Cohort(policy(RooflineCost(8)), 1), Cohort(policy(RooflineCost(8)), 64)
    for cohort in (few, many):
        cohort.step(rate=0.6, num_steps=200)
    assert np.mean(few.chosen[50:]) > np.mean(many.chosen[50:])
    assert many.chosen[-1] == 0, "each draft costs a token's time, and brings less"


def test_cohorts_are_judged_apart():
    shared = policy(num_cohorts=2)
    repetitive, other = Cohort(shared, index=0), Cohort(shared, index=1)
    for _ in range(60):
        repetitive.step(rate=0.95)
        other.step(rate=0.0)
    assert repetitive.chosen[-1] >= 4
    assert set(other.chosen) == {0}


def test_k_is_of_the_ladder_and_within_the_steps_room():
    cohort = Cohort(policy())
    cohort.step(rate=1.0, num_steps=50)
    assert cohort.chosen[-1] == 8
    cohort.step(rate=1.0, most=7)
    assert cohort.chosen[-1] == 4
    cohort.step(rate=1.0, most=1)
    assert cohort.chosen[-1] == 0


def test_k_does_not_flicker_between_equals():
    cohort = Cohort(policy(), 16)
    cohort.step(rate=0.7, num_steps=400)
    changes = sum(a != b for a, b in zip(cohort.chosen[100:], cohort.chosen[101:], strict=False))
    assert changes < 60


@pytest.mark.parametrize(("drafting_cost", "rate", "pays"), [(0.0, 0.4, True), (0.5, 0.4, False), (0.5, 0.9, True)])
def test_drafts_that_cost_something_must_bring_more(drafting_cost, rate, pays):
    cohort = Cohort(AdaptiveDrafts((0, 2, 4), 1, GPU, drafting_cost=drafting_cost))
    cohort.step(rate, num_steps=300)
    drafting = np.mean(np.array(cohort.chosen[100:]) > 0)
    assert drafting > 0.8 if pays else drafting < 0.2

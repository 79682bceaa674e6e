"""Requests outlive their engine, which is killed twice; tests/soak/test_recovery.py has all ways to die."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from recovery_campaign import Report, run_campaign, text_engine

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

NAMES = {
    "seeded penalties",
    "stop strings",
    "logprobs",
    "prompt logprobs",
    "seeded json",
    "repeats itself",
    "min tokens",
    "seeded, 2 continuations",
}


def test_requests_outlive_their_engine() -> None:
    setting = text_engine(
        "n-grams", num_stages=2, speculative={"method": "ngram", "min_n": 1, "num_speculative_tokens": 3}
    )
    few = tuple(one for one in setting.asked if one.name in NAMES)
    assert len(few) == len(NAMES)
    setting = replace(setting, asked=few, deaths=("stage 1", "driver"))
    report: Report = asyncio.run(run_campaign(setting, 2, 0))
    print(report)
    assert all(kill.num_carried_over for kill in report.kills)

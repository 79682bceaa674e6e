"""`tiny` and its head on text that neither of them has seen: drafts are accepted, and what spoils them is noticed."""

from __future__ import annotations

import sysconfig
from itertools import cycle
from pathlib import Path

import pytest
import torch
from sizes import sized

from raypp.api.tokenizer import Tokenizer
from raypp.config.engine_config import EngineConfig
from raypp.models.registry import resolve_draft_head_path, resolve_model_path
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.request import Request
from raypp.scheduler.scheduler_stats import SchedulerStats
from raypp.stage.step_layers import AuxStates
from raypp.testing import LocalEngine
from raypp.types import SamplingParams

HELD_OUT = ("argparse.py", "calendar.py", "fractions.py", "heapq.py", "queue.py", "shlex.py", "statistics.py", "csv.py")
NUM_TOKENS = 60
EAGLE3 = {"method": "eagle3", "model": "tiny-eagle3", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    library, tokenizer = Path(sysconfig.get_path("stdlib")), Tokenizer(resolve_model_path("tiny"))
    names = HELD_OUT[: sized(5, None)]
    texts = tokenizer.encode([(library / name).read_text(encoding="utf-8") for name in names])
    return [ids[len(ids) // 2 : len(ids) // 2 + 100] for ids in texts]


def run_requests(
    prompts: list[list[int]], *, temperatures: tuple[float, ...] = (0.0,), **settings
) -> tuple[list[Request], SchedulerStats]:
    """Return the ended requests, prompt by prompt at another of the temperatures."""
    fixed = {"stage_num_threads": 1, "max_model_len": 256, "num_kv_blocks": 400, "max_num_seqs": 16}
    engine = LocalEngine(plan_engine(EngineConfig.from_flat("tiny", **(fixed | settings)), Hardware(1)))
    requests = [
        engine.submit(
            prompt, SamplingParams(max_tokens=NUM_TOKENS, temperature=temperature, seed=index, ignore_eos=True)
        )
        for index, (prompt, temperature) in enumerate(zip(prompts, cycle(temperatures), strict=False))
    ]
    while engine.has_unfinished:
        engine.step()
    return requests, engine.stats()


def run(prompts: list[list[int]], **settings) -> tuple[list[list[int]], SchedulerStats]:
    """Return the texts."""
    requests, stats = run_requests(prompts, **settings)
    return [request.output_token_ids for request in requests], stats


@pytest.fixture(scope="module")
def without(prompts) -> list[list[int]]:
    return run(prompts)[0]


def test_drafts_are_accepted_and_the_text_is_the_same(prompts, without) -> None:
    """Those of a step are the same, and so is what is accepted of them, wherever the states come from."""
    accepted = set()
    for num_stages, mode in sized(((1, "none"), (4, "full")), ((1, "none"), (2, "full"), (4, "none"))):
        text, stats = run(prompts, num_stages=num_stages, mode=mode, speculative=EAGLE3)
        assert text == without
        print(f"{num_stages} stages: acceptance length {stats.acceptance_length:.2f}, {stats.accepted_by_position}")
        assert stats.acceptance_length >= 1.6
        assert stats.num_missed_rows == 0
        accepted.add(tuple(stats.accepted_by_position))
    assert len(accepted) == 1, accepted


@pytest.mark.parametrize(
    ("method", "cells"),
    [pytest.param("eagle3", ((1, 3), (5, 4)), marks=pytest.mark.full), ("auto", sized(((8, 2),), ((2, 1), (8, 2))))],
)
def test_sampled_text_is_the_same(prompts, method, cells) -> None:
    """Rows of chance and rows of none in one batch, with a head whose drafts are accepted in both."""
    temperatures = (0.0, 0.5)
    expected = [request.output_token_ids for request in run_requests(prompts, temperatures=temperatures)[0]]
    for num_drafts, num_stages in cells:
        settings = {"num_stages": num_stages, "temperatures": temperatures}
        speculative = EAGLE3 | {"method": method, "num_speculative_tokens": num_drafts}
        requests, stats = run_requests(prompts, speculative=speculative, **settings)
        assert [request.output_token_ids for request in requests] == expected
        accepted = [sum(request.draft_counts.num_accepted for request in requests[of::2]) for of in (0, 1)]
        print(f"{method}, {num_drafts} drafts, {num_stages} stages: {accepted} of {stats.num_draft_tokens} accepted")
        assert all(count > NUM_TOKENS * 2 // 3 for count in accepted)
        assert sum(accepted) < stats.num_draft_tokens
        if method == "auto":
            _, alone = run(prompts, speculative=speculative | {"method": "ngram", "model": None}, **settings)
            assert stats.num_accepted_tokens > alone.num_accepted_tokens


SPOILT = {
    "depths exchanged": lambda states: states[::-1],
    "the last depth missing": lambda states: [*states[:-1], torch.zeros_like(states[-1])],
    "the token before": lambda states: [each.roll(1, 0) for each in states],
}


@pytest.mark.full
def test_a_wrong_state_lowers_acceptance(prompts, without, monkeypatch) -> None:
    right = run(prompts, num_stages=2, speculative=EAGLE3)[1].acceptance_length
    gather = AuxStates.gather
    for name, spoil in SPOILT.items():
        with monkeypatch.context() as patch:
            patch.setattr(AuxStates, "gather", lambda self, *args, spoil=spoil: spoil(gather(self, *args)))
            text, stats = run(prompts, num_stages=2, speculative=EAGLE3)
        print(f"{name}: acceptance length {stats.acceptance_length:.2f} in place of {right:.2f}")
        assert text == without  # whatever the drafts are
        assert stats.acceptance_length < 0.93 * right


@pytest.mark.parametrize("num_drafts", [3, None])
def test_n_grams_go_first_where_they_match(prompts, without, num_drafts) -> None:
    text, stats = run(
        prompts, num_stages=2, speculative=EAGLE3 | {"method": "auto", "num_speculative_tokens": num_drafts}
    )
    assert text == without
    print(f"auto, K {num_drafts or 'adaptive'}: {stats.num_generated_tokens / stats.num_steps:.2f} tokens per step")
    _, alone = run(prompts, num_stages=2, speculative={"method": "ngram", "num_speculative_tokens": num_drafts})
    assert stats.acceptance_length > 1.6
    if num_drafts is not None:
        assert stats.num_missed_rows == 0 < alone.num_missed_rows


def test_the_head_is_small() -> None:
    files = list(resolve_draft_head_path("tiny-eagle3").iterdir())
    assert sum(file.stat().st_size for file in files) <= 2_000_000

"""Runs engines that draft, writes down every draft, and holds it against a reference's."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest
import torch
from eagle_reference import Guess
from exactness import TIE_GAP

from raypp.config.engine_config import EngineConfig
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.request import Request
from raypp.scheduler.scheduler_stats import SchedulerStats
from raypp.stage.speculation import Speculation
from raypp.testing import LocalEngine
from raypp.types import SamplingParams

NUM_TOKENS = 20
NUM_DRAFTS = 3


class Reference(Protocol):
    """A head and its target, all positions at once and no cache."""

    def states(self, token_ids: list[int]) -> torch.Tensor:
        """Return what the head is told of the target's states, [T, H]."""

    def drafts(self, states: torch.Tensor, token_ids: list[int], count: int) -> list[Guess]:
        """Return guesses of what follows `token_ids`, given the target's states at all of them but the last."""


@dataclass
class Proposal:
    """A row's text when it was proposed drafts, and those that it has room for."""

    text: tuple[int, ...]
    drafts: list[int]


class Witness:
    """Writes down what every row is proposed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.proposals: list[Proposal] = []
        original = Speculation.propose

        def propose(speculation, tokens, followed, max_length, most):
            drafts = original(speculation, tokens, followed, max_length, most)
            rows, lengths = tokens.rows, tokens.lengths
            table, limits = speculation.tokens.table, speculation.tables._limits.tolist()
            for row, length, line in zip(rows.tolist(), lengths.tolist(), drafts.tolist(), strict=True):
                if row < len(table) - 2:  # else padding
                    room = min(most, max(limits[row] - length, 0))  # behind a row's end nothing is kept
                    self.proposals.append(Proposal(tuple(table[row, :length].tolist()), line[:room]))
            return drafts

        monkeypatch.setattr(Speculation, "propose", propose)

    def compare(self, reference: Reference) -> Counter[str]:
        """Hold every proposal against the reference's; return how many drafts were compared and excused."""
        counts: Counter[str] = Counter()
        texts = sorted({proposal.text for proposal in self.proposals})
        longest = [a for a, b in zip(texts, [*texts[1:], ()], strict=True) if b[: len(a)] != a]
        states = {text: reference.states(list(text)) for text in longest}
        expected = {}
        for proposal in self.proposals:
            text = proposal.text
            if text not in expected:
                whole = next(whole for whole in longest if whole[: len(text)] == text)
                expected[text] = reference.drafts(states[whole], list(text), NUM_DRAFTS)
            for draft, guess in zip(proposal.drafts, expected[text], strict=False):
                counts["compared"] += 1
                if draft != guess.token_id:
                    assert guess.gap < TIE_GAP, (text, proposal.drafts, expected[text])
                    counts["excused"] += 1
                    break
        return counts


def make_requests(vocab_size: int) -> list[tuple[list[int], SamplingParams]]:
    """Return requests whose prompts share a beginning of two blocks and a half, twice the same one among them."""
    rng = random.Random(1)
    shared = [rng.randrange(2, vocab_size) for _ in range(10)]
    prompts = [shared + [rng.randrange(2, vocab_size) for _ in range(count)] for count in (0, 7, 19, 2, 40, 6)]
    prompts += [prompts[2], [5], [*shared[:8], 3, 4, 5, 6, 7]]
    return [
        (
            prompt,
            SamplingParams(
                max_tokens=NUM_TOKENS - index,
                temperature=(0.0, 0.7)[index % 3 == 1],
                seed=index,
                ignore_eos=True,
            ),
        )
        for index, prompt in enumerate(prompts)
    ]


def run(
    target: Path, asked: list[tuple[list[int], SamplingParams]], *, has_nodes: bool = False, **settings
) -> tuple[list[Request], SchedulerStats, LocalEngine]:
    """Return the ended requests; each comes a few steps after the one before."""
    fixed = {"stage_num_threads": 1, "block_size": 4, "max_model_len": 120, "max_num_seqs": 5}
    config = EngineConfig.from_flat(str(target), **(fixed | settings))
    engine = LocalEngine(plan_engine(config, Hardware(1)), has_nodes=has_nodes)
    requests = []
    for prompt, params in asked:
        requests.append(engine.submit(prompt, params))
        for _ in range(2):
            engine.step()
    victim = engine.submit(asked[4][0], asked[4][1])
    engine.step()
    engine.abort(victim)
    while not all(request.finish_reason for request in requests):
        engine.step()
        engine.scheduler.check_integrity()
    engine.drain()
    return requests, engine.stats(), engine

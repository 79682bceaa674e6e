"""A request whose logits are NaN or infinite ends with an error of its own; the others do not notice."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from op_tape import tape_graphs
from sizes import sized

from raypp.config.engine_config import EngineConfig
from raypp.errors import NonFiniteLogitsError
from raypp.openai_api.error_bodies import describe_error
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.stage.step_end import Sampler
from raypp.testing import LocalEngine, build_local_pipeline
from raypp.types import SamplingParams

PROMPTS = ([5, 6, 7] * 4, [9, 10, 11] * 3, [30, 31] * 5)
PARAMS = (
    SamplingParams(max_tokens=12, temperature=0.0, seed=0, ignore_eos=True),
    SamplingParams(max_tokens=12, temperature=0.8, top_p=0.9, seed=1, ignore_eos=True, logprobs=1),
    SamplingParams(max_tokens=12, temperature=0.0, seed=2, ignore_eos=True, presence_penalty=0.5),
)
DRAFTS = {"speculative": {"method": "ngram", "num_speculative_tokens": 3}}


def _outputs(make_graphs: Any = None, **settings: Any) -> tuple[list[list[int]], list[NonFiniteLogitsError]]:
    """Run all requests; return their tokens, and the errors."""
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 4, "max_model_len": 96, "num_stages": 2}
    plan = plan_engine(EngineConfig.from_flat("tiny", **(sizes | settings)), Hardware(1))
    engine = LocalEngine(plan, pipeline=build_local_pipeline(plan, make_graphs=make_graphs))
    requests = [engine.submit(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    errors = []
    while engine.has_unfinished:
        try:
            engine.step()
        except NonFiniteLogitsError as error:
            errors.append(error)
    engine.drain()
    engine.scheduler.check_integrity()
    return [request.output_token_ids for request in requests], errors


@pytest.mark.in_ci("plain-0-nan", "drafts-2-inf", "preemption-2-inf", "recorded-0-nan")
@pytest.mark.parametrize(
    ("failing", "bad"), sized([(0, torch.nan), (2, torch.inf)], list(product((0, 1, 2), (torch.nan, torch.inf))))
)
@pytest.mark.parametrize(
    ("make_graphs", "settings"),
    [
        (None, {}),
        (None, DRAFTS),
        (None, {"num_kv_blocks": 10, "max_model_len": 36, **DRAFTS}),
        (tape_graphs, {"mode": "full", **DRAFTS}),
    ],
    ids=["plain", "drafts", "preemption", "recorded"],
)
def test_one_request_fails_and_the_others_do_not_notice(monkeypatch, make_graphs, settings, failing, bad):
    expected, none = _outputs(**settings)
    assert not none
    choose, fails_from = Sampler.choose, len(PROMPTS[failing]) + 5

    def spoiled(self, logits, rows, positions, *args):
        is_bad = (self.rows.tables.seed[rows] == failing) & (positions >= fails_from)  # a row may change hands
        logits = logits.clone()
        logits[:, 40] = torch.where(is_bad, bad, logits[:, 40])
        return choose(self, logits, rows, positions, *args)

    monkeypatch.setattr(Sampler, "choose", spoiled)
    outputs, [error] = _outputs(make_graphs, **settings)
    assert outputs[failing] == expected[failing][:5]
    assert outputs[:failing] + outputs[failing + 1 :] == expected[:failing] + expected[failing + 1 :]
    assert "after 5 tokens" in str(error)
    status, body = describe_error(error)
    assert (status, body.error.code) == (500, "non_finite_logits")

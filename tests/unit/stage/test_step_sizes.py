"""Which steps are padded to what: every mixture of rows, and what a stage then does with them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from recorded_plans import mixed_requests, record_plans

from raypp.config.engine_config import EngineConfig
from raypp.messages import StepForm, StepPlan
from raypp.plan.engine_plan import EnginePlan, plan_engine
from raypp.plan.graph_plan import step_sizes
from raypp.plan.hardware import Hardware
from raypp.stage.full_graphs import FullGraphs
from raypp.stage.step_layers import StepLayers
from raypp.stage.step_sizes import FullSize, StepPadding, StepSizes
from raypp.testing import LocalEngine, build_local_pipeline

MAX_TOKENS = 20
DRAFTS = {"method": "ngram", "draft_ladder": [0, 2]}


def _engine_plan(mode: str, num_stages: int = 1, **settings: object) -> EnginePlan:
    settings = {"max_num_seqs": 6, "max_num_batched_tokens": 32, "max_piecewise_tokens": MAX_TOKENS} | settings
    return plan_engine(EngineConfig.from_flat("tiny", mode=mode, num_stages=num_stages, **settings), Hardware(1))


def _wanted(mode: str, **settings: object) -> StepSizes:
    plan = _engine_plan(mode, **settings)
    return step_sizes(plan.config, plan.graphs)


@cache
def _any_plan() -> StepPlan:
    return record_plans(_engine_plan("none"), num_requests=1, max_prompt=4)[-1]


def _plan(num_drafts: int, num_decode_rows: int, chunks: tuple[int, ...], num_starting: int = 0) -> StepPlan:
    num_rows = num_decode_rows + len(chunks)
    return replace(
        _any_plan(),
        num_drafts=num_drafts,
        num_decode_rows=num_decode_rows,
        rows=np.arange(num_rows, dtype=np.int32),
        num_scheduled_tokens=np.array([1 + num_drafts] * num_decode_rows + list(chunks), np.int32),
        num_computed_tokens=np.zeros(num_rows, np.int32),
        samples=np.ones(num_rows, np.bool_),
        start_rows=np.arange(num_starting, dtype=np.int32),
    )


def _mixtures() -> list[StepPlan]:
    """Return every step of up to 6 decode rows with 0 to 3 drafts and up to 3 chunks of 1 to 12 tokens, and starts."""
    chunks = [c for count in range(4) for c in itertools.product((1, 2, 3, 5, 12), repeat=count)]
    return [
        _plan(num_drafts, num_rows, of_prompts, starting)
        for num_drafts, num_rows, of_prompts in itertools.product(range(4), range(7), chunks)
        for starting in range(len(of_prompts) + 1)
        if num_rows + len(of_prompts)
    ]


def test_only_uniform_decode_steps_are_full():
    sizes = _wanted("full_and_piecewise", speculative=DRAFTS)
    assert {size.num_drafts for size in sizes.full} == {0, 2}
    padding = StepPadding(sizes)
    num_full = num_piecewise = num_plain = 0
    for plan in _mixtures():
        num_rows, query_lens = len(plan.rows), set(plan.num_scheduled_tokens.tolist())
        num_tokens = int(plan.num_scheduled_tokens.sum())
        form, bucket, message = padding.size_of(plan)
        assert len(plan.rows) == num_rows
        if form is StepForm.FULL_GRAPH:
            rows = bucket
            num_full += 1
            assert message == (rows, rows * (1 + plan.num_drafts), 0, rows * (1 + plan.num_drafts))
            assert query_lens == {1 + plan.num_drafts}
            assert plan.num_decode_rows == num_rows <= rows
            assert FullSize(rows, plan.num_drafts) in sizes.full
            continue
        if plan.num_decode_rows == num_rows and plan.num_drafts in (0, 2):
            pytest.fail(f"{num_rows} decode rows with {plan.num_drafts} drafts are no full step")
        assert message[:2] == (num_rows, num_tokens)
        assert (form is StepForm.EAGER) == (num_tokens > MAX_TOKENS)
        if form is StepForm.PIECEWISE:
            num_piecewise += 1
            assert num_tokens <= bucket <= max(16, 2 * num_tokens)
        num_plain += form is StepForm.EAGER
    assert num_full == 2 * 6
    assert min(num_piecewise, num_plain) > 1000


@pytest.mark.parametrize(
    ("mode", "has_full", "has_piecewise"),
    [
        ("auto", False, False),
        ("none", False, False),
        ("full", True, False),
        ("piecewise", False, True),
        ("full_and_piecewise", True, True),
    ],
)
def test_modes_on_a_cpu(mode, has_full, has_piecewise):
    sizes = _wanted(mode)
    assert (bool(sizes.full), bool(sizes.piecewise)) == (has_full, has_piecewise)
    padding = StepPadding(sizes)
    assert (padding.size_of(_plan(0, 3, ())).form is StepForm.FULL_GRAPH) == has_full
    assert (padding.size_of(_plan(0, 0, (5,))).form is StepForm.PIECEWISE) == has_piecewise
    graphs = _engine_plan(mode).stage_spec(0).graphs
    assert not StepSizes.wanted(graphs, (0,), max_step_rows=6, max_step_tokens=32, modes=("piecewise",)).full


def test_sizes_that_all_stages_have():
    ours = StepSizes((FullSize(4, 0), FullSize(2, 0), FullSize(1, 2)), (32, 16))
    theirs = StepSizes((FullSize(4, 0), FullSize(1, 2)), (16,))
    assert StepSizes.common([ours, theirs]) == StepSizes((FullSize(4, 0), FullSize(1, 2)), (16,))
    assert StepSizes.common([ours]) == ours
    assert StepSizes.common([ours, StepSizes()]) == StepSizes()


@pytest.mark.parametrize("num_stages", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize("mode", ["full", "piecewise", "full_and_piecewise"])
def test_steps_go_where_they_belong(monkeypatch, mode, num_stages):
    """Mixed requests through a whole engine: the tokens are the same, and every kind of step was there."""
    seen = {"full": 0, "piecewise": 0, "none": 0}
    full, layers = FullGraphs.run, StepLayers.run

    def run_full(self, size):
        seen["full"] += 1
        return full(self, size)

    def run_layers(self, batch, entering):
        form, bucket, _ = batch.size
        if form is not StepForm.FULL_GRAPH:
            seen["none" if bucket is None else "piecewise"] += 1
            assert (form is StepForm.EAGER) == (bucket is None)
            assert (bucket is None) == (len(entering) > MAX_TOKENS or mode == "full")
            if bucket is not None and not batch.prefill_query_lens:
                assert mode == "piecewise"
        return layers(self, batch, entering)

    settings = {"num_stages": num_stages, "speculative": DRAFTS, "max_num_seqs": 12, "min_prefill_chunk_tokens": 24}
    prompts, params = mixed_requests(9, 260, 40)
    plain = _engine_plan("none", **settings)
    expected = LocalEngine(plain).generate(prompts, params)
    monkeypatch.setattr(FullGraphs, "run", run_full)
    monkeypatch.setattr(StepLayers, "run", run_layers)
    plan = _engine_plan(mode, **settings)
    pipeline = build_local_pipeline(plan)
    seen.update(dict.fromkeys(seen, 0))
    assert LocalEngine(plan, pipeline=pipeline).generate(prompts, params) == expected
    assert seen["none"] > 0
    assert (seen["full"] > 0) == ("full" in mode)
    assert (seen["piecewise"] > 0) == ("piecewise" in mode)

"""One list of step plans, run by different pipelines, and all that it leaves: results and KV caches, bit by bit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from raypp.graphs.graph_manager import CudaGraphManager
from raypp.messages import MaskUpdate, StepPlan, StepResult
from raypp.models.config import ModelConfig
from raypp.ops.kv_cache import sides
from raypp.plan.engine_plan import EnginePlan
from raypp.stage.build_stage import StageFactory, build_stage_model
from raypp.stage.stage_model import StageModel
from raypp.stage.stage_spec import GraphSpec, StageSpec
from raypp.testing import LocalEngine, LocalPipeline, build_local_pipeline, build_local_stages
from raypp.testing.local_engine import MakeGraphs
from raypp.types import SamplingParams


@dataclass
class Ran:
    """What a list of plans left behind."""

    results: list[dict[str, NDArray[Any]]]  # what counts of them
    kv_caches: list[torch.Tensor]  # keys, values, ... of all layers, without the null block
    num_compared: int  # replays that debug mode compared
    costs: list[dict]  # what each stage's recordings took

    def assert_equals(self, other: Ran, *, kv_caches: bool = True) -> None:
        """Compare everything, bit by bit; what a padded step leaves behind the rows' ends lies in the null block."""
        differing = [
            (step, field)
            for step, (a, b) in enumerate(zip(self.results, other.results, strict=True))
            for field in a
            if not np.array_equal(a[field], b[field])
        ]
        assert not differing, f"{len(differing)} fields of the {len(self.results)} results differ: {differing[:9]}"
        if kv_caches:
            for layer, (a, b) in enumerate(zip(self.kv_caches, other.kv_caches, strict=True)):
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), f"the KV cache of layer {layer} differs"


class _Noting:
    """A pipeline that keeps the plans it is given."""

    def __init__(self, pipeline: LocalPipeline) -> None:
        self._pipeline = pipeline
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self._pipeline.submit(plan)

    def send_masks(self, update: MaskUpdate) -> None:
        self._pipeline.send_masks(update)

    def collect(self) -> list[StepResult]:
        return self._pipeline.collect()

    def close(self) -> None:
        self._pipeline.close()


def mixed_requests(num_requests: int, vocab_size: int, max_prompt: int, seed: int = 0) -> tuple[list, list]:
    """Return prompts of mixed lengths and parameters of all kinds: greedy, drawn, truncated, penalized, biased."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(2, vocab_size) for _ in range(rng.randint(1, max_prompt))] for _ in range(num_requests)]
    kinds = (
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.8},
        {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "logprobs": 2},
        {"temperature": 0.9, "repetition_penalty": 1.2},
        {"temperature": 0.7, "presence_penalty": 0.5, "logit_bias": {9: 2.0}, "min_tokens": 3, "stop_token_ids": [2]},
        {"temperature": 0.0},
    )
    params = [
        SamplingParams(max_tokens=rng.randint(4, 24), seed=i, ignore_eos=True, **kinds[i % len(kinds)])
        for i in range(num_requests)
    ]
    return prompts, params


def record_plans(plan: EnginePlan, num_requests: int, max_prompt: int, seed: int = 0) -> list[StepPlan]:
    """Return the plans of a run of mixed requests, half of which come while the others are under way."""
    noting = _Noting(build_local_pipeline(plan))
    engine = LocalEngine(plan, pipeline=noting)
    prompts, params = mixed_requests(num_requests, plan.model.vocab_size, max_prompt, seed)
    half = num_requests // 2
    for prompt, of_prompt in zip(prompts[:half], params[:half], strict=True):
        engine.submit(prompt, of_prompt)
    for prompt, of_prompt in zip(prompts[half:], params[half:], strict=True):
        for _ in range(3):
            engine.step()
        engine.submit(prompt, of_prompt)
    while engine.has_unfinished:
        engine.step()
    return noting.plans


def run_plans(
    plan: EnginePlan,
    plans: Sequence[StepPlan],
    graphs: GraphSpec,
    *,
    max_step_rows: int | None = None,
    make_graphs: MakeGraphs | None = None,
    factory: StageFactory | None = None,
) -> Ran:
    """Run plans on the stages of `plan`, whatever pipeline they were made for.

    Args:
        plan: How many stages, and of what.
        plans: The steps.
        graphs: Which of them are padded.
        max_step_rows: Of the pipeline that the plans were made for: it says what they are padded to.
        make_graphs: None: CUDA graphs where there is CUDA.
        factory: Of the stages' models.
    """
    managers: list[CudaGraphManager] = []

    def make(spec: StageSpec) -> CudaGraphManager:
        assert make_graphs is not None
        managers.append(make_graphs(spec))
        return managers[-1]

    specs = [replace(plan.stage_spec(index), graphs=graphs) for index in range(len(plan.stages))]
    if max_step_rows is not None:
        specs = [replace(spec, max_step_rows=max_step_rows) for spec in specs]
    stages = build_local_stages(specs, plan.model, factory, None if make_graphs is None else make)
    pipeline, results = LocalPipeline([local.stage for local in stages]), []
    for step in plans:
        pipeline.submit(step)
        results += [_what_counts(result, step.num_drafts) for result in pipeline.collect()]
    caches = [side[1:].clone() for local in stages for side in sides(local.kv_caches)]
    costs = [local.stage.graphs.describe() for local in stages]
    return Ran(results, caches, sum(manager.num_compared for manager in managers), costs)


class StageModels:
    """The models of a plan's stages, loaded once: a `StageFactory`."""

    def __init__(self, plan: EnginePlan) -> None:
        specs = [plan.stage_spec(index) for index in range(len(plan.stages))]
        self._models = [build_stage_model(spec, plan.model, None) for spec in specs]

    def __call__(self, spec: StageSpec, config: ModelConfig) -> StageModel:
        return self._models[spec.stage_index]


def _what_counts(result: StepResult, num_drafts: int) -> dict[str, NDArray[Any]]:
    """Return a result without what nobody reads: tokens past a row's end, which saw the null block, are noise."""
    is_valid = np.arange(result.token_ids.shape[1]) < result.num_valid[:, None]
    fields = {"num_valid": result.num_valid, "token_ids": np.where(is_valid, result.token_ids, -1)}
    if not num_drafts:
        return fields | {"logprobs": result.logprobs, "num_matched": result.num_matched}
    return fields | {
        "num_drafted": result.num_drafted,
        "num_matched": np.minimum(result.num_matched, result.num_valid - 1),
    }


def called_graphs(spec: StageSpec) -> CudaGraphManager:
    """Return a manager that calls programs: the same padded steps, operation by operation."""
    return CudaGraphManager(None)

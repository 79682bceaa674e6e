"""A whole engine in one process: the scheduler, and all stages joined by local links. For tests."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from raypp.driver.engine_loop import Engine
from raypp.driver.grammars import Grammars
from raypp.driver.pipeline import Pipeline
from raypp.graphs.graph_manager import CudaGraphManager
from raypp.messages import Int32s
from raypp.models.config import ModelConfig
from raypp.plan.engine_plan import EnginePlan
from raypp.prompt_items import PromptItems
from raypp.request import Request, RequestUpdate
from raypp.scheduler.scheduler import Scheduler
from raypp.scheduler.scheduler_stats import SchedulerStats
from raypp.stage.build_stage import StageFactory, allocate_kv_caches, build_stage_model
from raypp.stage.schemas import StageSchemas
from raypp.stage.stage import Stage
from raypp.stage.stage_spec import StageSpec
from raypp.stage.step_sizes import StepSizes
from raypp.testing.inline_grammars import InlineGrammars
from raypp.testing.local_encoder import LocalEncoder
from raypp.testing.local_pipeline import LocalPipeline
from raypp.tracing import Tracer
from raypp.transport.open import open_local_links
from raypp.types import SamplingParams

MakeGraphs = Callable[[StageSpec], CudaGraphManager]


@dataclass(frozen=True)
class LocalStage:
    """A stage, and what else there is of it."""

    stage: Stage
    kv_caches: torch.Tensor  # of its layers, [L, ...], see `raypp.ops.kv_cache`


def build_local_stages(
    specs: Sequence[StageSpec],
    config: ModelConfig,
    factory: StageFactory | None = None,
    make_graphs: MakeGraphs | None = None,
) -> list[LocalStage]:
    """Return the stages of a pipeline, joined by local links.

    Args:
        specs: Of all stages, in order.
        config: The model's.
        factory: Makes their models, if the checkpoint does not.
        make_graphs: Makes what keeps a stage's recordings, if not the device decides.
    """
    models = [build_stage_model(spec, config, factory) for spec in specs]
    schemas = StageSchemas.of(specs[0], models[0].hidden_size)
    links = open_local_links(
        len(specs),
        forward=schemas.forward_messages(specs[0]),
        feedback=schemas.feedback_messages(specs[0]),
        device=torch.device(specs[0].device),
    )
    silent, stages = Tracer("local", enabled=False), []
    for spec, model, of_stage in zip(specs, models, links, strict=True):
        kv_caches = allocate_kv_caches(spec, config)
        graphs = None if make_graphs is None else make_graphs(spec)
        stages.append(LocalStage(Stage(spec, model, kv_caches, of_stage, schemas, silent, graphs), kv_caches))
    sizes = StepSizes.common([local.stage.recordings.sizes for local in stages])
    for local in stages:
        local.stage.pad_to(sizes)
    return stages


def build_local_pipeline(
    plan: EnginePlan, factory: StageFactory | None = None, make_graphs: MakeGraphs | None = None
) -> LocalPipeline:
    """Return all stages of a plan, joined by local links; see `build_local_stages`."""
    specs = [plan.stage_spec(index) for index in range(len(plan.stages))]
    return LocalPipeline([local.stage for local in build_local_stages(specs, plan.model, factory, make_graphs)])


class LocalEngine:
    """Runs requests to their end in the calling thread."""

    def __init__(
        self,
        plan: EnginePlan,
        factory: StageFactory | None = None,
        pipeline: Pipeline | None = None,
        *,
        mask_lateness: random.Random | None = None,
    ) -> None:
        """Make the scheduler and the stages.

        Args:
            plan: What to make.
            factory: Makes the stages' models, if the checkpoint does not.
            pipeline: The stages, if they are made already.
            mask_lateness: Lets the masks of grammars come late at random.
        """
        self.scheduler = Scheduler(plan.scheduler_limits(), plan.draft_policy(), plan.step_predictor())
        encoder: LocalEncoder | None = None
        if pipeline is None:
            specs = [plan.stage_spec(index) for index in range(len(plan.stages))]
            stages = [local.stage for local in build_local_stages(specs, plan.model, factory)]
            pipeline = LocalPipeline(stages)
            if plan.encoders.num_encoders and factory is None:
                encoder = LocalEncoder(plan, stages[0].items)
        backend = InlineGrammars(plan.vocabulary_source(), lateness=mask_lateness)
        grammars = Grammars(backend, math.inf, pipeline.send_masks)
        self._engine = Engine(self.scheduler, pipeline, Tracer("local", enabled=False), encoder, grammars)
        self._num_requests = 0

    def submit(
        self,
        prompt_token_ids: Int32s | Sequence[int],
        params: SamplingParams,
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        bad_word_token_ids: tuple[tuple[int, ...], ...] = (),
        priority: int = 0,
        items: PromptItems | None = None,
        cache_salt: str = "",
        seed: int | None = None,
        output_token_ids: Sequence[int] = (),
    ) -> Request:
        """Take in a request and return it; its output fills as `step` is called.

        `seed` counts where `params` have none; `output_token_ids` are those that another engine has brought.
        """
        seed = self._num_requests if seed is None else seed
        request = Request(
            request_id=f"request-{self._num_requests}",
            prompt_token_ids=np.array(prompt_token_ids, np.int32),
            params=params,
            seed=params.seed if params.seed is not None else seed,
            eos_token_ids=eos_token_ids,
            bad_word_token_ids=bad_word_token_ids,
            priority=priority,
            items=items,
            cache_salt=cache_salt,
            output_token_ids=list(output_token_ids),
        )
        self._num_requests += 1
        self._engine.add(request)
        return request

    def abort(self, request: Request) -> bool:
        """End a request now; return whether it was running."""
        return self._engine.abort(request)

    def step(self) -> Sequence[RequestUpdate]:
        """Collect one step and dispatch what may go; return what changed.

        Raises:
            RequestError: a request was taken in and cannot run after all.
        """
        self._engine.step()
        for _, error in self._engine.take_failed():
            raise error
        return self._engine.take_updates()

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        return self._engine.has_unfinished

    def drain(self) -> None:
        """Collect all steps in flight."""
        while self.scheduler.num_in_flight:
            self.step()

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[list[int]]:
        """Run the prompts together to their end; return their output tokens."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        requests = [self.submit(prompt, of_prompt) for prompt, of_prompt in zip(prompts, each, strict=True)]
        while self.has_unfinished:
            self.step()
        return [request.output_token_ids for request in requests]

    def stats(self) -> SchedulerStats:
        """Return the scheduler's counters."""
        return self.scheduler.stats()

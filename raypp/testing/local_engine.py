"""A whole engine in one process: the scheduler, and all stages joined by local links. For tests."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from threading import Condition
from typing import Any

import numpy as np
import torch

from raypp.driver.engine_loop import Engine, Pipeline
from raypp.driver.grammars import Grammars
from raypp.driver.item_encoders import ItemEvent, ItemFailed, ItemsDropped, ItemsStored, encoder_sums
from raypp.encoder.build_encoder import build_manager
from raypp.encoder.delivery import ItemReceiver, ItemSender, Parcel
from raypp.encoder.worker import EncoderWorker
from raypp.errors import EngineDeadError
from raypp.grammar.grammar_threads import Job, MaskJob
from raypp.grammar.vocabulary import Vocabulary, VocabularySource
from raypp.graphs.graph_manager import CudaGraphManager
from raypp.members import Members
from raypp.messages import Int32s, MaskUpdate, StepPlan, StepResult, pack, unpack
from raypp.models.config import ModelConfig
from raypp.models.registry import build_encoder
from raypp.models.weights import open_weights
from raypp.ops.row_state import LayerMemory
from raypp.plan.engine_plan import EnginePlan
from raypp.prompt_items import EncoderItem, PromptItems
from raypp.request import Request, RequestUpdate
from raypp.scheduler.scheduler import Scheduler
from raypp.scheduler.scheduler_stats import SchedulerStats
from raypp.stage.build_stage import StageFactory, allocate_kv_caches, build_stage_model
from raypp.stage.loop import SteppedStage
from raypp.stage.schemas import StageSchemas
from raypp.stage.stage import Stage
from raypp.stage.stage_spec import StageSpec
from raypp.stage.step_items import ItemStore
from raypp.stage.step_result import PendingResult
from raypp.stage.step_sizes import StepSizes
from raypp.tracing import Tracer
from raypp.transport.edges import OpenEdge
from raypp.transport.ipc.cuda_device import CudaDevice
from raypp.transport.open import open_local_links, open_local_members
from raypp.types import SamplingParams


class LocalPipeline:
    """A `Pipeline` of stages joined by local links. Every plan is packed and unpacked, as it would be on the wire."""

    def __init__(self, stages: Sequence[SteppedStage]) -> None:
        self._stages = stages
        self._submitted: list[StepPlan] = []

    @property
    def items(self) -> list[ItemStore]:
        """Of the first stage's members."""
        first = self._stages[0]
        members = first.members if isinstance(first, MemberThreads) else [first]
        return [member.items for member in members if isinstance(member, Stage)]

    def submit(self, plan: StepPlan) -> None:
        """Queue a plan; `collect` executes it."""
        self._submitted.append(unpack(StepPlan, pack(plan)))

    def send_masks(self, update: MaskUpdate) -> None:
        """Tell the last stage which tokens grammars allow."""
        self._stages[-1].take_masks(unpack(MaskUpdate, pack(update)))

    def collect(self) -> list[StepResult]:
        """Execute the oldest plan and return its result: the others stay in flight, as they would in real life."""
        if not self._submitted:
            return []
        plan = self._submitted.pop(0)
        result = None
        with torch.inference_mode():
            for stage in self._stages:
                stage.announce(plan)
                result = stage.step(plan)
        assert result is not None
        return [unpack(StepResult, pack(result.wait()))]

    def close(self) -> None:
        """Forget the plans that were not executed."""
        self._submitted.clear()


class LocalEncoder:
    """The plan's own tower behind its graphs' manager, cache and parcels. An `ItemEncoders`.

    Args:
        plan: Of the engine.
        stores: Of the first stage's members.
    """

    def __init__(self, plan: EnginePlan, stores: Sequence[ItemStore]) -> None:
        spec, device = plan.encoders.spec(0), torch.device(plan.device)
        source = open_weights(spec.load_format, spec.model_path, spec.seed, device)
        tower = build_encoder(plan.model, dtype=getattr(torch, plan.dtype), device=device, source=source)
        self.worker = EncoderWorker(build_manager(tower, spec), spec.cache_bytes, device)
        self._stores = stores
        self._way = ItemSender(device), self._put
        self._receiver = ItemReceiver(device, CudaDevice)
        self._events: list[ItemEvent] = []

    def encode(self, items: Sequence[EncoderItem]) -> None:
        """Encode the items, and put them into the store."""
        faults = {fault.key: fault.error for fault in self.worker.deliver(items, [self._way])}
        self._events.append(ItemsStored([item.key for item in items if item.key not in faults]))
        self._events += [ItemFailed(key, error) for key, error in faults.items()]

    def drop(self, keys: Sequence[bytes]) -> None:
        """Take embeddings out of the store."""
        for store, key in product(self._stores, keys):
            store.drop(key)
        self._events.append(ItemsDropped(keys))

    def poll(self) -> list[ItemEvent]:
        """Return what happened since the last call."""
        events, self._events = self._events, []
        return events

    def stats(self) -> dict[str, Any]:
        """Return the encoder's figures."""
        counted = self.worker.stats()
        return {"encoders": {"num_encoders": 1, "num_up": 1, "actors": [counted]}, **encoder_sums([counted])}

    def _put(self, parcel: Parcel) -> None:
        for store, item in product(self._stores, self._receiver.take_in(0, parcel)):
            store.put(item)


class InlineGrammars:
    """A `GrammarBackend`."""

    def __init__(self, source: VocabularySource, *, lateness: random.Random | None = None) -> None:
        """Do nothing yet; the tokenizer is loaded when the first grammar comes.

        Args:
            source: Of the vocabulary.
            lateness: Hold masks back at random, by this many calls of `receive`.
        """
        self._source = source
        self._lateness = lateness
        self._done: deque[tuple[int, Job]] = deque()
        self._num_calls = 0

    def submit(self, job: Job) -> None:
        """Do a job now."""
        job.run(lambda: self._vocabulary)
        is_late = self._lateness is not None and isinstance(job, MaskJob)
        delay = self._lateness.choice((0, 0, 1, 2, 5)) if is_late and self._lateness is not None else 0
        self._done.append((self._num_calls + delay, job))

    def receive(self) -> list[Job]:
        """Return what is due."""
        self._num_calls += 1
        due = [job for call, job in self._done if call <= self._num_calls]
        self._done = deque(entry for entry in self._done if entry[0] > self._num_calls)
        return due

    def fileno(self) -> int | None:
        """Return nothing: a job is done as soon as it was submitted."""
        return None

    def give_up(self, job: Job) -> None:
        """Do nothing: no job is under way between two calls."""

    def close(self) -> None:
        """End nothing."""

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return self._source.load()


_MEMBER_DEADLINE_S = 60.0

MakeGraphs = Callable[[StageSpec], CudaGraphManager]


@dataclass(frozen=True)
class LocalStage:
    """A stage, and what else there is of it."""

    stage: Stage
    kv_caches: list[LayerMemory]  # of its layers


def build_local_stages(
    specs: Sequence[StageSpec],
    config: ModelConfig,
    factory: StageFactory | None = None,
    make_graphs: MakeGraphs | None = None,
    *,
    deadline_s: float = 0.0,
    open_edge: OpenEdge | None = None,
    tracers: Sequence[Tracer] | None = None,
    members: Sequence[Members] | None = None,
    has_nodes: bool = False,
) -> list[LocalStage]:
    """Return the stages of a pipeline, joined by local links.

    Args:
        specs: Of all stages, in order.
        config: The model's.
        factory: Makes their models, if the checkpoint does not.
        make_graphs: Makes what keeps a stage's graphs, if not the device decides.
        deadline_s: See `open_local_links`.
        open_edge: See there.
        tracers: Of the stages; None: nothing is traced.
        members: Of each stage, the one with the specs' rank; None: stages have one.
        has_nodes: Whether stages are linked as if each had a node of its own.
    """
    of_stages: Sequence[Members | None] = members or [None] * len(specs)
    models = [build_stage_model(spec, config, factory, of) for spec, of in zip(specs, of_stages, strict=True)]
    schemas = StageSchemas.of(specs[0], models[0].hidden_size)
    links = open_local_links(
        len(specs),
        forward=schemas.forward_messages(specs[0]),
        feedback=schemas.feedback_messages(specs[0]),
        device=torch.device(specs[0].device),
        deadline_s=deadline_s,
        open_edge=open_edge,
        members=members if has_nodes else None,
    )
    tracers, stages = tracers or [Tracer("local", enabled=False)] * len(specs), []
    for spec, model, of_stage, tracer, of in zip(specs, models, links, tracers, of_stages, strict=True):
        kv_caches = allocate_kv_caches(spec, config)
        graphs = None if make_graphs is None else make_graphs(spec)
        stages.append(LocalStage(Stage(spec, model, kv_caches, of_stage, schemas, tracer, graphs, of), kv_caches))
    sizes = StepSizes.common([local.stage.graphs.sizes for local in stages])
    for local in stages:
        local.stage.pad_to(sizes)
    return stages


def build_members(
    plan: EnginePlan,
    factory: StageFactory | None = None,
    make_graphs: MakeGraphs | None = None,
    *,
    member_deadline_s: float = _MEMBER_DEADLINE_S,
    turn: Condition | None = None,
    **others: Any,
) -> list[list[LocalStage]]:
    """Return the members of all stages of a plan, by rank and stage, joined by local links.

    Args:
        plan: Of the engine.
        factory: See `build_local_stages`.
        make_graphs: See there.
        member_deadline_s: How long a member waits for the others of its stage.
        turn: Members that hold it let others have it while they wait for them.
        **others: See there.
    """
    num_stages, count = len(plan.stages), plan.num_members
    groups = [open_local_members(count, member_deadline_s, turn) for _ in range(num_stages)] if count > 1 else []

    def build(rank: int) -> list[LocalStage]:
        specs, members = [plan.stage_spec(index, rank) for index in range(num_stages)], [of[rank] for of in groups]
        try:
            with turn or nullcontext():
                return build_local_stages(specs, plan.model, factory, make_graphs, members=members or None, **others)
        except BaseException:
            for each in members:
                each.abort()
            raise

    if count == 1:
        return [build(0)]
    with ThreadPoolExecutor(count, "member") as threads:  # side by side: what they record, they compute together
        building = [threads.submit(build, rank) for rank in range(count)]
    errors = [error for each in building if (error := each.exception()) is not None]
    if errors:  # of the first that failed by itself; the others were aborted
        raise next((error for error in errors if not isinstance(error, EngineDeadError)), errors[0])
    return [each.result() for each in building]


class MemberThreads:
    """The members of a stage, each in a thread of its own, one at a time. A `SteppedStage`.

    Side by side, they would take turns at each of Python's instructions, which takes twice the processor time.
    """

    def __init__(self, members: Sequence[Stage], turn: Condition) -> None:
        self.members = members
        self._turn = turn
        self._threads = ThreadPoolExecutor(len(members), "member")

    def bind_thread(self) -> None:
        """Do nothing: the members' threads are there already, and on a CPU."""

    def announce(self, plan: StepPlan) -> None:
        """Say so to all."""
        for member in self.members:
            member.announce(plan)

    def take_masks(self, update: MaskUpdate) -> None:
        """Hand them to the first, which decides for all."""
        self.members[0].take_masks(update)

    def step(self, plan: StepPlan) -> PendingResult | None:
        """Step all; return the first one's result."""

        def step(member: Stage) -> PendingResult | None:
            try:
                with torch.inference_mode(), self._turn:
                    return member.step(plan)
            except BaseException:
                member.abort()
                raise

        results = list(self._threads.map(step, self.members))
        return results[0]

    def catch_up(self) -> bool:
        """Return whether all have."""
        return all([member.catch_up() for member in self.members])


def build_local_pipeline(
    plan: EnginePlan, factory: StageFactory | None = None, make_graphs: MakeGraphs | None = None, **others: Any
) -> LocalPipeline:
    """Return all stages of a plan, joined by local links; see `build_members`."""
    turn = Condition()
    columns = build_members(plan, factory, make_graphs, turn=turn, **others)
    by_rank = [[local.stage for local in column] for column in columns]
    return LocalPipeline(
        by_rank[0] if len(by_rank) == 1 else [MemberThreads(of_stage, turn) for of_stage in zip(*by_rank, strict=True)]
    )


class LocalEngine:
    """Runs requests to their end in the calling thread."""

    def __init__(
        self,
        plan: EnginePlan,
        factory: StageFactory | None = None,
        pipeline: Pipeline | None = None,
        *,
        mask_lateness: random.Random | None = None,
        has_nodes: bool = False,
    ) -> None:
        """Make the scheduler and the stages.

        Args:
            plan: What to make.
            factory: Makes the stages' models, if the checkpoint does not.
            pipeline: The stages, if they are made already.
            mask_lateness: Lets the masks of grammars come late at random.
            has_nodes: Whether stages are linked as if each had a node of its own.
        """
        self.scheduler = Scheduler(plan.scheduler_limits(), plan.draft_policy(), plan.step_predictor())
        encoder: LocalEncoder | None = None
        if pipeline is None:
            local = build_local_pipeline(plan, factory, has_nodes=has_nodes)
            pipeline = local
            if plan.encoders.num_encoders and factory is None:
                encoder = LocalEncoder(plan, local.items)
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

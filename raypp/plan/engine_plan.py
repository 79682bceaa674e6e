"""From what the user asked for to what will run: no `auto` is left, every stage has its layers and its memory.

Pure: reads the model's config.json and the machine's description, starts nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import add
from pathlib import Path
from typing import Any

from raypp.config.engine_config import EngineConfig
from raypp.config.sections import TransportKind
from raypp.errors import ConfigError, ResourceError
from raypp.grammar.vocabulary import VocabularySource
from raypp.messages import BlockGroup
from raypp.models.generation_config import read_sampling_defaults
from raypp.models.registry import resolve_model_path
from raypp.models.sizes import WeightReads, layer_sizes, lm_head_bytes, total_reads
from raypp.plan.cost_model import estimated_costs, estimated_times, min_prefill_chunk, slice_bytes
from raypp.plan.engine_layout import EngineLayout, lay_out
from raypp.plan.graph_plan import describe_graphs, graph_spec, max_step_rows
from raypp.plan.hardware import Hardware
from raypp.plan.layer_partition import stage_costs
from raypp.plan.speculation_plan import (
    check_host_memory,
    draft_cost,
    draft_policy,
    resolved_speculation,
    table_bytes,
    usual_proposals,
)
from raypp.plan.stage_memory import (
    block_mix,
    check_cpu_memory,
    check_main_memory,
    longest_request,
    max_copied_blocks,
    num_blocks_on_cpu,
    num_blocks_on_gpus,
    num_snapshots,
    num_staged_blocks,
    plan_cpu_kv,
)
from raypp.scheduler.drafts import DraftPolicy
from raypp.scheduler.limits import STEPS_PER_COHORT, SchedulerLimits
from raypp.scheduler.step_budget import StepPredictor
from raypp.stage.stage_spec import NUM_PADDING_ROWS, GraphSpec, StageSpec

_LOG = logging.getLogger(__name__)
_LINK_MARGIN_S = 5.0  # the driver, which sees all stages, names the frozen one before a neighbour gives up
_SHORT_STEP_MS = 2.0
"""From a result to the plan that builds on it takes the hosts up to 1.1 ms: docs/design/0140-a-third-step-ahead.md."""


@dataclass(frozen=True, kw_only=True)
class StageLayout:
    """One stage's share of the model and of the memory."""

    stage_index: int
    start_layer: int
    end_layer: int  # exclusive
    weight_bytes: int
    kv_cache_bytes: int
    state_bytes: int  # of rows, in layers that keep some
    cpu_kv_bytes: int  # of main memory
    token_table_bytes: int  # of the last stage; 0 on others
    draft_head_bytes: int = 0  # of `weight_bytes`, those of a draft head and what it uses, on the last stage

    @property
    def num_layers(self) -> int:
        """Layers of the stage."""
        return self.end_layer - self.start_layer


@dataclass(frozen=True, kw_only=True)
class EnginePlan(EngineLayout):
    """The configuration with everything decided."""

    transport: TransportKind
    max_model_len: int
    groups: tuple[BlockGroup, ...]  # layers that keep the same tokens, and the KV blocks of every stage for them
    num_staged_blocks: int  # of these, the ones on their way at a time
    num_cpu_snapshots: int  # of rows' states, that every stage has room for in CPU memory
    max_copied_blocks: int  # of these, the most that a plan brings back while others run
    graphs: GraphSpec  # which steps are recorded and replayed
    max_steps_per_cohort: int  # in flight
    stages: tuple[StageLayout, ...]
    sampling_defaults: Mapping[str, Any]  # of `SamplingParams`, where a request says nothing

    @property
    def num_blocks(self) -> int:
        """KV blocks of every stage, of the group of layers that sees the most; the null block included."""
        return self.groups[0].num_blocks

    def scheduler_limits(self) -> SchedulerLimits:
        """Return what the scheduler must keep to."""
        vision = self.model.vision
        return SchedulerLimits(
            num_stages=len(self.stages),
            max_steps_per_cohort=self.max_steps_per_cohort,
            max_num_seqs=self.config.scheduler.max_num_seqs,
            max_num_batched_tokens=self.config.scheduler.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            block_size=self.config.cache.block_size,
            groups=self.groups,
            max_copied_blocks=self.max_copied_blocks,
            num_snapshots=num_snapshots(self.config) if self.model.has_row_states else None,
            num_cpu_snapshots=self.num_cpu_snapshots,
            snapshot_bytes=sum(stage.row_bytes for stage in self.memory),
            enable_prefix_caching=self.config.cache.enable_prefix_caching,
            min_prefill_chunk_tokens=self.min_prefill_chunk_tokens,
            max_itl_ms=self.config.scheduler.max_itl_ms or math.inf,
            max_drafts=self.config.speculative.max_drafts,
            # A head's last guess never enters; the others do, behind the row's end.
            num_lookahead_tokens=0 if self.draft_head is None else self.config.speculative.max_drafts - 1,
            caches_next_token=self.draft_head is not None,
            vocab_size=self.model.vocab_size,
            max_item_tokens=self.encoders.max_item_tokens,
            whole_item_tokens=0 if vision is None or not vision.sees_ahead else vision.tokens_per_max_image,
        )

    def stage_resources(self) -> dict[str, float]:
        """Return what a stage asks Ray for: its members are on one node."""
        return {name: amount * self.num_members for name, amount in self.member_resources().items()}

    def member_resources(self) -> dict[str, float]:
        """Return what one member of a stage asks Ray for."""
        parallel = self.config.parallel
        resources = {"CPU": parallel.stage_num_cpus}
        if self.device == "cuda":
            resources["GPU"] = parallel.stage_num_gpus
        return resources

    def draft_policy(self) -> DraftPolicy:
        """Return what chooses the number of drafts of each step."""
        return draft_policy(self.config, self.device, self.held_model, self.held_head, self.dtype_bytes)

    @property
    def drafting_bytes(self) -> int:
        """What a draft head reads for a step's drafts."""
        head, num_drafts = self.held_head, usual_proposals(self.config)
        return 0 if head is None else int(head.drafting_bytes(num_drafts, self.dtype_bytes))

    @property
    def min_prefill_chunk_tokens(self) -> int:
        """Tokens that no chunk of a prompt falls below, unless its step is full."""
        asked, predictor = self.config.scheduler.min_prefill_chunk_tokens, self.step_predictor()
        on_gpu = self.device == "cuda"
        return asked or min_prefill_chunk(self.model, predictor.stages, predictor.roofline, on_gpu=on_gpu)

    def step_predictor(self) -> StepPredictor:
        """Return what predicts how long a step takes, at first from estimates."""
        free_step_tokens = self.config.speculative.free_step_tokens
        roofline = draft_cost(self.held_model, self.dtype_bytes, self.device, free_step_tokens)
        estimates = estimated_times(
            self.held_model,
            [stage.num_layers for stage in self.stages],
            self.dtype_bytes,
            self.kv_dtype_bytes,
            free_tokens=roofline.free_tokens,
            gpus=[gpus.weakest for gpus in self.gpus] if self.device == "cuda" else None,
        )
        return StepPredictor(roofline, estimates)

    def vocabulary_source(self) -> VocabularySource:
        """Return where the tokens come from that grammars allow."""
        return VocabularySource(self.model_path, self.model.vocab_size, tuple(sorted(self.model.eos_token_ids)))

    @property
    def num_members(self) -> int:
        """Members of each stage."""
        return self.model.num_members

    def stage_specs(self) -> list[StageSpec]:
        """Return those of all members of all stages, the members of a stage one after the other."""
        return [self.stage_spec(stage.stage_index, rank) for stage in self.stages for rank in range(self.num_members)]

    def stage_spec(self, stage_index: int, rank: int = 0) -> StageSpec:
        """Return what a member of a stage must be told."""
        layout, indices = self.stages[stage_index], self.gpus[stage_index].indices
        return StageSpec(
            stage_index=stage_index,
            num_stages=len(self.stages),
            rank=rank,
            num_members=self.num_members,
            max_steps_per_cohort=self.max_steps_per_cohort,
            start_layer=layout.start_layer,
            end_layer=layout.end_layer,
            model_path=self.model_path,
            load_format=self.config.model.load_format,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            is_batch_invariant=self.config.model.batch_invariant,
            device=self.device if indices is None else f"{self.device}:{indices[rank]}",
            seed=self.config.model.seed,
            num_threads=self.num_threads,
            max_num_seqs=self.config.scheduler.max_num_seqs + NUM_PADDING_ROWS,
            max_step_rows=max_step_rows(self.config),
            graphs=self.graphs,
            max_step_tokens=self.config.scheduler.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            vocab_size=self.model.vocab_size,
            block_size=self.config.cache.block_size,
            groups=self.groups,
            layer_groups=tuple(map(self.model.group_of, range(layout.start_layer, layout.end_layer))),
            num_snapshots=num_snapshots(self.config) if self.model.has_row_states else 0,
            num_cpu_snapshots=self.num_cpu_snapshots,
            num_staged_blocks=self.num_staged_blocks,
            max_drafts=self.config.speculative.max_drafts,
            speculative=self.config.speculative,
            takes_items=self.model.vision is not None,
            items_see_ahead=self.model.vision is not None and self.model.vision.sees_ahead,
            num_deepstack_layers=self.model.num_deepstack_layers,
            num_carried_taps=max(0, self.model.num_deepstack_layers - self.stages[0].end_layer),
            layer_input_sizes=tuple(
                self.model.stream_size(each) - self.model.hidden_size for each in self.start_layers
            ),
            ngram_window=self.ngram_window,
            draft_head=self.draft_head,
            transport=self.transport,
            link_timeout_s=self.config.faults.step_timeout_s + _LINK_MARGIN_S,
            trace=self.config.observability.trace is not None,
        )

    def resolved_config(self) -> EngineConfig:
        """Return the configuration with what was decided in place of what was left open."""
        return self.config.with_settings(
            **resolved_speculation(self.config, self.ngram_window, self.draft_head),
            max_piecewise_tokens=self.graphs.max_piecewise_tokens or None,
            max_steps_per_cohort=self.max_steps_per_cohort,
            min_prefill_chunk_tokens=self.min_prefill_chunk_tokens,
            dtype=self.dtype,
            device=self.device,
            max_model_len=self.max_model_len,
            num_kv_blocks=self.num_blocks,
            kv_cache_dtype="model" if self.kv_dtype == self.dtype else "fp8",
            layer_partition=[stage.num_layers for stage in self.stages],
            transport=self.transport,
            stage_num_threads=self.num_threads,
        )

    def model_info(self) -> dict[str, Any]:
        """Return what clients must know of the model; see `raypp.api.launch.EngineHandle`."""
        return {
            "model_path": self.model_path,
            "vocab_size": self.model.vocab_size,
            "max_model_len": self.max_model_len,
            "eos_token_ids": sorted(self.model.eos_token_ids),
            "vision": self.model.vision,
            "sampling_defaults": self.sampling_defaults,
        }

    def describe(self) -> dict[str, Any]:
        """Return layers, bytes and blocks per stage, as plain data."""
        return {
            "model": self.config.model.model,
            "architecture": self.model.architecture,
            "dtype": self.dtype,
            "kv_cache_dtype": self.kv_dtype,
            "vocab_size": self.model.vocab_size,
            "device": self.device,
            "transport": self.transport,
            "tensor_parallel_size": self.num_members,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.config.scheduler.max_num_seqs,
            "max_steps_per_cohort": self.max_steps_per_cohort,
            "num_threads_per_stage": self.num_threads,
            "block_size": self.config.cache.block_size,
            "num_kv_blocks": self.num_blocks,
            "fullest_stage": None if self.device == "cpu" else self.fullest_stage,
            "num_cpu_kv_blocks": sum(group.num_cpu_blocks for group in self.groups),
            "num_cpu_state_snapshots": self.num_cpu_snapshots,
            "kv_groups": [
                {"window": group.window, "num_kv_blocks": group.num_blocks, "num_cpu_kv_blocks": group.num_cpu_blocks}
                for group in self.groups
            ],
            "num_drafts": list(self.config.speculative.ladder),
            "draft_head_weights": None if self.draft_head is None else self.draft_head.config.weights_name,
            "graphs": describe_graphs(self.config, self.graphs),
            "encoders": self.encoders.describe(),
            "sampling_defaults": dict(self.sampling_defaults) or None,
            "stages": [
                {
                    "stage_index": stage.stage_index,
                    "layers": [stage.start_layer, stage.end_layer],
                    "num_layers": stage.num_layers,
                    "weight_bytes": stage.weight_bytes,
                    **_described(self._step_reads(stage)),
                    "kv_cache_bytes": stage.kv_cache_bytes,
                    "state_bytes": stage.state_bytes,
                    "cpu_kv_bytes": stage.cpu_kv_bytes,
                    "token_table_bytes": stage.token_table_bytes,
                    "sent_bytes_per_token": sent,
                    "sent_bytes_per_token_to_another_node": slice_bytes(sent, self.num_members),
                    "draft_head_bytes": stage.draft_head_bytes,
                    "num_kv_blocks": self.num_blocks,
                }
                for stage, sent in zip(self.stages, [*self.edge_bytes, 0], strict=True)
            ],
        }

    def _step_reads(self, stage: StageLayout) -> WeightReads:
        """Return what a step reads of a stage's weights: all, but of the embedding only a row per token."""
        dtype_bytes = self.dtype_bytes
        is_last = stage.stage_index == len(self.stages) - 1
        head_bytes = lm_head_bytes(self.model, dtype_bytes) + self.drafting_bytes if is_last else 0
        sizes = layer_sizes(self.held_model, dtype_bytes)[stage.start_layer : stage.end_layer]
        return total_reads([WeightReads(head_bytes), *(size.reads for size in sizes)])


def plan_engine(config: EngineConfig, hardware: Hardware) -> EnginePlan:
    """Decide everything that the configuration leaves open.

    Raises:
        ConfigError: settings that cannot work together or with this model.
        ModelLoadError: no such model, or one of an architecture that raypp does not have.
        ResourceError: the KV cache is too small for one request.
    """
    plan = plan_layout(lay_out(config, hardware, resolve_model_path), hardware)
    asked, held = config.scheduler.max_num_seqs, plan.config.scheduler.max_num_seqs
    if held < asked:
        _LOG.warning(
            "max_num_seqs is %d instead of %d: layers keep a state of each running request, %.1f MiB on a stage; more "
            "memory, or a smaller max_model_len, leave room for more",
            held,
            asked,
            max(stage.row_bytes for stage in plan.memory) / 2**20,
        )
    return plan


def plan_layout(layout: EngineLayout, hardware: Hardware) -> EnginePlan:
    """Decide how many KV blocks the stages hold, and with that all that was still open.

    Raises:
        ConfigError, ResourceError: as `plan_engine`.
    """
    config, model, memory = layout.config, layout.model, layout.memory
    block_bytes, mix = [stage.block_bytes for stage in memory], block_mix(config, model)
    choose = num_blocks_on_cpu if layout.device == "cpu" else num_blocks_on_gpus
    num_blocks = mix.of(choose(config, mix, memory))
    cpu_kv = plan_cpu_kv(config, memory, num_blocks)
    kv_cache_bytes = [stage.kv(num_blocks) for stage in memory]
    cpu_kv_bytes = [stage.cpu_kv(cpu_kv) for stage in memory]
    if layout.device == "cpu":
        kv_bytes = list(map(add, kv_cache_bytes, cpu_kv_bytes))
        check_main_memory(memory, kv_bytes, model.num_members)
        of_member = replace(hardware, memory_bytes=hardware.memory_bytes // model.num_members)
        check_host_memory(config, of_member, layout.ngram_window, memory[-1].weight_bytes + kv_bytes[-1])
    else:
        check_cpu_memory(config, hardware, cpu_kv_bytes, model.num_members)
    last = len(layout.layers) - 1
    stages = tuple(
        StageLayout(
            stage_index=index,
            start_layer=start,
            end_layer=start + count,
            weight_bytes=memory[index].weight_bytes,
            kv_cache_bytes=kv_cache_bytes[index],
            state_bytes=memory[index].state_bytes,
            cpu_kv_bytes=cpu_kv_bytes[index],
            token_table_bytes=table_bytes(config, layout.ngram_window) if index == last else 0,
            draft_head_bytes=layout.draft_head_bytes if index == last else 0,
        )
        for index, (start, count) in enumerate(zip(layout.start_layers, layout.layers, strict=True))
    )
    has_defaults = config.model.generation_config == "auto"
    plan = EnginePlan(
        **vars(layout),
        transport=_transport(config, layout.device),
        max_model_len=longest_request(config, model, mix, num_blocks),
        groups=tuple(
            BlockGroup(count, window, in_cpu_memory, sum(of_group))
            for count, window, in_cpu_memory, of_group in zip(
                num_blocks, mix.windows, cpu_kv.num_blocks, zip(*block_bytes, strict=True), strict=True
            )
        ),
        num_cpu_snapshots=cpu_kv.num_snapshots,
        num_staged_blocks=num_staged_blocks(config, block_bytes),
        max_copied_blocks=max_copied_blocks(block_bytes),
        graphs=graph_spec(config, model, layout.device, layout.dtype_bytes, hardware.gpu_memory_bytes),
        max_steps_per_cohort=_max_steps_per_cohort(layout),
        stages=stages,
        sampling_defaults=read_sampling_defaults(Path(layout.model_path)) if has_defaults else {},
    )
    _check_whole_items(plan.scheduler_limits())
    return plan


def _check_whole_items(limits: SchedulerLimits) -> None:
    """Refuse a plan with which every image would be refused."""
    least = limits.whole_item_tokens + limits.max_step_rows - 1
    if limits.max_num_batched_tokens < least and limits.whole_item_tokens:
        raise ConfigError(
            "scheduler.max_num_batched_tokens is too small for an image, which this model computes whole",
            got=limits.max_num_batched_tokens,
            expected=f"at least {least}: {limits.whole_item_tokens} tokens of an image, and a token for each other row",
            hint="raise max_num_batched_tokens, lower max_num_seqs, or take text alone: num_encoders = 0",
        )
    if limits.max_whole_item_tokens < limits.whole_item_tokens:
        raise ResourceError(
            "the KV blocks of layers with a window do not hold an image, which this model computes whole",
            got=f"{limits.max_whole_item_tokens} tokens beside the window",
            expected=f"at least {limits.whole_item_tokens}",
            hint="more memory for the KV cache, or text alone: num_encoders = 0",
        )


def _described(reads: WeightReads) -> dict[str, Any]:
    """Return the bytes that a step reads whatever its tokens, and those of experts where there are any."""
    described: dict[str, Any] = {"step_weight_bytes": reads.always}
    if reads.experts:
        described |= {"expert_bytes": reads.experts, "chosen_expert_share": reads.chosen}
    if reads.num_parts > 1:
        described |= {"num_experts": reads.num_experts, "num_expert_parts": reads.num_parts}
    return described


def _transport(config: EngineConfig, device: str) -> TransportKind:
    """Return the link to ask for; on GPUs `auto` stays, for which links there can be depends on where stages run."""
    asked = config.parallel.transport
    if config.parallel.num_stages == 1:
        return "local"
    if device != "cpu":
        return asked
    if asked in ("ipc", "nccl"):
        raise ConfigError(f"{asked} links join GPUs", got="stages on CPUs", hint="leave transport at auto")
    return "gloo" if asked == "auto" else asked


def _max_steps_per_cohort(layout: EngineLayout) -> int:
    """Return how many steps of a cohort may be in flight at a time.

    With two, the hosts have as long as one takes, through all stages, to answer its result. Where that is short they
    get another one. A request that comes then waits one such step longer; drafts would be chosen by older results.
    """
    config = layout.config
    if config.scheduler.max_steps_per_cohort is not None:
        return config.scheduler.max_steps_per_cohort
    if layout.device != "cuda" or config.speculative.max_drafts:
        return STEPS_PER_COHORT
    costs = [estimated_costs(layout.model, layout.dtype_bytes, on_gpu=True, gpu=gpus.weakest) for gpus in layout.gpus]
    return STEPS_PER_COHORT + (sum(stage_costs(costs, layout.layers)) < _SHORT_STEP_MS)

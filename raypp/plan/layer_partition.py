"""How many layers each stage gets: as configured, or so that the slowest stage is as fast as possible."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from raypp.config.engine_config import EngineConfig
from raypp.errors import ConfigError, ResourceError
from raypp.models.config import ModelConfig
from raypp.models.draft_head_config import DraftHeadConfig
from raypp.plan.cost_model import DECODE_ROWS, StepCosts, estimated_costs
from raypp.plan.graph_plan import max_step_rows
from raypp.scheduler.drafts import SHADOW_SHARE

_ROUNDING = 1e-9  # sums of costs that are equal on paper


def layers_per_stage(
    config: EngineConfig, model: ModelConfig, head: DraftHeadConfig | None, dtype_bytes: int, device: str
) -> list[int]:
    """Return the number of layers of each stage.

    Args:
        config: Of the engine.
        model: Its sizes.
        head: What drafts on the last stage; None: nothing does, or n-grams.
        dtype_bytes: Of a weight.
        device: Of the stages.

    Raises:
        ConfigError: what is configured does not add up to the model.
    """
    num_stages, explicit = config.parallel.num_stages, config.parallel.layer_partition
    if explicit is None:
        num_rows = min(DECODE_ROWS, max_step_rows(config))
        return fastest_partition(costs_of(config, model, head, dtype_bytes, device, num_rows), num_stages)
    if sum(explicit) != model.num_layers:
        raise ConfigError(
            "layer_partition does not add up to the model's layers",
            got=f"{explicit}, {sum(explicit)} layers",
            expected=f"{model.num_layers} layers",
        )
    return list(explicit)


def costs_of(
    config: EngineConfig,
    model: ModelConfig,
    head: DraftHeadConfig | None,
    dtype_bytes: int,
    device: str,
    num_rows: int,
    kv_bytes: Sequence[float] | None = None,
) -> StepCosts:
    """Return the costs of a step of so many decode rows, with the prompts and drafts that it usually has.

    Args:
        config: Of the engine.
        model: Its sizes, or those of one member of a stage.
        head: See `layers_per_stage`.
        dtype_bytes: Of a weight.
        device: Of the stages.
        num_rows: Of the step.
        kv_bytes: See `estimated_costs`.
    """
    num_proposed = 0.0 if head is None else float(config.speculative.max_drafts)
    if config.speculative.num_speculative_tokens is None:
        num_proposed *= SHADOW_SHARE  # while all stages are busy; one request waits for their sum
    return estimated_costs(
        model,
        dtype_bytes,
        on_gpu=device == "cuda",
        num_rows=num_rows,
        num_prompt_tokens=prompt_tokens_of_step(config, num_rows),
        num_verified=config.speculative.usual_drafts,
        num_proposed=num_proposed,
        drafting_bytes=0 if head is None else head.drafting_bytes(num_proposed, dtype_bytes),
        kv_bytes=kv_bytes,
    )


def prompt_tokens_of_step(config: EngineConfig, num_rows: int) -> int:
    """Return the prompt tokens of the mean step of so many decode rows, in the traffic that layers are cut for."""
    wanted = round(num_rows * config.parallel.prompt_tokens_per_output)
    return min(wanted, config.scheduler.max_num_batched_tokens - num_rows)


def even_partition(num_layers: int, num_stages: int) -> list[int]:
    """Return the layers of each stage when nothing but layers counts; the first stages get what is left over."""
    return [num_layers // num_stages + (index < num_layers % num_stages) for index in range(num_stages)]


@dataclass(frozen=True)
class LayerRoom:
    """What layers take of the stages' memory."""

    layer_bytes: Sequence[int]  # of each layer: weights, and the KV cache that it must have
    stage_bytes: Sequence[int]  # that each stage has for them

    def most_layers(self) -> list[int]:
        """Return how many layers each stage holds if it holds the smallest ones."""
        taken = [*accumulate(sorted(self.layer_bytes))]
        return [bisect_right(taken, room) for room in self.stage_bytes]


def fastest_partition(costs: StepCosts, num_stages: int, room: LayerRoom | None = None) -> list[int]:
    """Return the layers of each stage for which the slowest one is fastest; see `partition_layers`."""
    return partition_layers(
        costs.layers,
        num_stages,
        first_stage_cost=costs.first_stage,
        last_stage_cost=costs.last_stage,
        room=room,
    )


def partition_layers(
    layer_costs: Sequence[float],
    num_stages: int,
    *,
    first_stage_cost: float = 0.0,
    last_stage_cost: float = 0.0,
    room: LayerRoom | None = None,
) -> list[int]:
    """Return the number of layers of each stage that minimizes the slowest stage's cost, every stage with at least one.

    Solved exactly, by two dynamic programs over prefixes: the first finds the least cost that the slowest stage can
    have. Of all partitions with that cost, the second finds the one with the least sum of squared stage costs, so that
    no other stage is slower than it need be.

    Args:
        layer_costs: Of each layer, in any unit of time or bytes.
        num_stages: P.
        first_stage_cost: What the first stage does besides its layers (the embedding), in the same unit.
        last_stage_cost: What the last stage does besides its layers (norm, LM head, sampling).
        room: What layers take of the stages' memory; None: no limit.

    Raises:
        ConfigError: fewer layers than stages.
        ResourceError: the stages' memory does not hold all layers.
    """
    num_layers = len(layer_costs)
    if num_stages > num_layers:
        raise ConfigError(
            "more stages than layers",
            got=f"num_stages={num_stages}",
            expected=f"at most {num_layers}, the model's layers",
            hint="every stage holds at least one layer",
        )
    prefix = [0.0, *accumulate(layer_costs)]
    taken = [0, *accumulate([0] * num_layers if room is None else room.layer_bytes)]
    limits = [0] * num_stages if room is None else room.stage_bytes

    def cost(stage: int, start: int, end: int) -> float:
        return (
            prefix[end]
            - prefix[start]
            + (first_stage_cost if stage == 0 else 0.0)
            + (last_stage_cost if stage == num_stages - 1 else 0.0)
        )

    def starts(stage: int, end: int) -> range:
        return range(max(stage, bisect_left(taken, taken[end] - limits[stage])), end)

    # slowest[end]: the least that the slowest of the stages so far can cost, when they hold the layers [0, end).
    slowest = [0.0] + [math.inf] * num_layers
    for stage in range(num_stages):
        slowest = [
            min((max(slowest[start], cost(stage, start, end)) for start in starts(stage, end)), default=math.inf)
            for end in range(num_layers + 1)
        ]
    if room is not None and math.isinf(slowest[num_layers]):
        raise ResourceError(
            "the model does not fit into the stages' memory",
            got=f"room for {room.most_layers()} layers",
            expected=f"{num_layers} layers, at least one per stage",
            hint="more stages, or less KV cache (max_model_len, num_kv_blocks)",
        )
    bound = slowest[num_layers] + _ROUNDING * max(1.0, abs(slowest[num_layers]))

    # best[end]: the least sum of squares within that bound, and where the stages are cut for it.
    unreached: tuple[float, tuple[int, ...]] = (math.inf, ())
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())] + [unreached] * num_layers
    for stage in range(num_stages):
        best = [
            min(
                (
                    (best[start][0] + cost(stage, start, end) ** 2, (*best[start][1], end))
                    for start in starts(stage, end)
                    if cost(stage, start, end) <= bound
                ),
                default=unreached,
            )
            for end in range(num_layers + 1)
        ]
    cuts = best[num_layers][1]
    return [end - start for start, end in zip((0, *cuts), cuts, strict=False)]

"""How many layers each stage gets: as configured, or so that the slowest stage is as fast as possible.

Where GPUs differ, what their memory holds is weighed against that.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import le

from raypp.config.engine_config import EngineConfig
from raypp.errors import ConfigError, ResourceError
from raypp.models.config import ModelConfig
from raypp.models.draft_head_config import DraftHeadConfig
from raypp.models.sizes import kv_bytes_per_token, layer_sizes, state_bytes_per_row
from raypp.plan.cost_model import DECODE_ROWS, StepCosts, estimated_costs
from raypp.plan.graph_plan import max_step_rows
from raypp.plan.hardware import StageGpus
from raypp.plan.speculation_plan import usual_proposals
from raypp.plan.stage_memory import StageMemory, block_mix, num_snapshots, num_state_rows

_ROUNDING = 1e-9  # sums of costs that are equal on paper
_MORE = 0.02
"""Requests by which partitions differ."""


def layers_per_stage(
    config: EngineConfig, model: ModelConfig, costs: Sequence[StepCosts], room: RoomFor | None = None
) -> list[int]:
    """Return the number of layers of each stage.

    By default the slowest stage is as fast as can be. Where stages have memory of different sizes, that is weighed
    against the requests for which it suffices: as many as possible per time of the slowest stage, see `_weighed`.

    Args:
        config: Of the engine.
        model: Its layers.
        costs: Of a step, for each stage.
        room: Returns the stages' room, given how many requests are to run at once; None: it is not weighed.

    Raises:
        ConfigError: what is configured does not add up to the model, or the model cannot be cut there.
    """
    explicit, num_layers, begins = config.parallel.layer_partition, model.num_layers, model.stage_begins
    if explicit is None:
        weighed = None if room is None else _weighed(costs, room, _most_requests(config), begins)
        return weighed or fastest_partition(costs, begins=begins)
    if sum(explicit) != num_layers:
        raise ConfigError(
            "layer_partition does not add up to the model's layers",
            got=f"{explicit}, {sum(explicit)} layers",
            expected=f"{num_layers} layers",
        )
    for begin in accumulate(explicit[:-1]):
        if begin not in begins:
            raise _cut_apart(model, begin, explicit, fastest_partition(costs, begins=begins))
    return list(explicit)


def _cut_apart(model: ModelConfig, begin: int, explicit: Sequence[int], possible: Sequence[int]) -> ConfigError:
    """Return what is wrong with a stage that begins with a layer."""
    sources = ((layer, each.attention.source) for layer, each in enumerate(model.attention) if each.attention)
    layer, source = next((layer, source) for layer, source in sources if source is not None and source < begin <= layer)
    return ConfigError(
        "layer_partition cuts between a layer and one that attends to its keys and values",
        got=f"{list(explicit)}: layer {layer} takes those of layer {source}, and a stage begins with layer {begin}",
        expected=_possible_cuts(model.stage_begins),
        hint=f"layer_partition={list(possible)}, or leave layer_partition out",
    )


def _possible_cuts(begins: Sequence[int]) -> str:
    """Return how many stages there may be, and which layers they may begin with, as text."""
    firsts = [layer for layer in begins[1:] if layer - 1 not in begins[1:]]
    lasts = [layer for layer in begins[1:] if layer + 1 not in begins]
    spans = [f"{first} to {last}" if first < last else f"{first}" for first, last in zip(firsts, lasts, strict=True)]
    several = f"at most {len(begins)} stages, the later ones beginning with one of layers {', '.join(spans)}"
    return several if spans else "num_stages = 1"


def _most_requests(config: EngineConfig) -> int:
    """Return how many requests stages are cut for: as many rows for each as its costs are for."""
    return min(config.scheduler.max_num_seqs, DECODE_ROWS * config.parallel.num_stages)


def _weighed(costs: Sequence[StepCosts], room: RoomFor, most: int, begins: Sequence[int]) -> list[int] | None:
    """Return the layers with the most requests per time of the slowest stage; None: no layers fit.

    From no request on, the fastest partition that holds more than the one before, until none does or all run.
    """
    best, best_score, wanted = None, -1.0, 0.0
    while True:
        try:
            layers = fastest_partition(costs, room(wanted), begins)
        except ResourceError:
            return best
        held = _requests_held(layers, room, wanted, most)
        score = held / max(stage_costs(costs, layers))
        if score > best_score:
            best, best_score = layers, score
        if held >= most:
            return best
        wanted = held + _MORE


def _requests_held(layers: Sequence[int], room: RoomFor, at_least: float, most: float) -> float:
    """Return for how many requests a partition has room."""
    low, high = at_least, float(most)
    if room(high).holds(layers):
        return high
    while high - low > _MORE / 2:
        middle = (low + high) / 2
        low, high = (middle, high) if room(middle).holds(layers) else (low, middle)
    return low


def costs_of(
    config: EngineConfig,
    model: ModelConfig,
    head: DraftHeadConfig | None,
    dtype_bytes: int,
    device: str,
    gpus: Sequence[StageGpus],
    *,
    num_rows: int | None = None,
    num_seen: Sequence[float] | None = None,
    kv_dtype_bytes: int = 2,
) -> list[StepCosts]:
    """Return the costs of a step for each stage, with the prompts and drafts that it usually has.

    Args:
        config: Of the engine.
        model: Its sizes, or those of one member of a stage.
        head: What drafts on the last stage; None: nothing does, or n-grams.
        dtype_bytes: Of a weight.
        device: Of the stages.
        gpus: Of each stage.
        num_rows: That decode; None: as many as stages are cut for.
        num_seen: See `estimated_costs`.
        kv_dtype_bytes: See there.
    """
    num_rows = num_rows or min(DECODE_ROWS, max_step_rows(config))
    num_proposed = usual_proposals(config)
    costs = {
        gpu: estimated_costs(
            model,
            dtype_bytes,
            on_gpu=device == "cuda",
            num_rows=num_rows,
            num_prompt_tokens=prompt_tokens_of_step(config, num_rows),
            num_verified=config.speculative.usual_drafts,
            num_proposed=num_proposed,
            drafting_bytes=0 if head is None else head.drafting_bytes(num_proposed, dtype_bytes),
            num_seen=num_seen,
            kv_dtype_bytes=kv_dtype_bytes,
            gpu=gpu,
        )
        for gpu in {of_stage.weakest for of_stage in gpus}
    }
    return [costs[of_stage.weakest] for of_stage in gpus]


def stage_costs(costs: Sequence[StepCosts], layers: Sequence[int]) -> list[float]:
    """Return what each stage costs with so many layers, given the costs of a step for each."""
    return [of_stage.of_stages(layers)[index] for index, of_stage in enumerate(costs)]


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

    def holds(self, layers: Sequence[int]) -> bool:
        """Return whether the stages have room for so many layers each."""
        taken, ends = [0, *accumulate(self.layer_bytes)], [0, *accumulate(layers)]
        needed = [taken[end] - taken[start] for start, end in pairwise(ends)]
        return all(map(le, needed, self.stage_bytes))


def layer_room(
    config: EngineConfig,
    model: ModelConfig,
    memory: Sequence[StageMemory],
    *,
    dtype_bytes: int,
    kv_dtype_bytes: int,
    num_blocks: int,
) -> LayerRoom:
    """Return what layers take, states of rows included, and what each stage has for them.

    Args:
        config: Of the engine.
        model: Its sizes.
        memory: Of each stage, without any layers.
        dtype_bytes: Of a weight.
        kv_dtype_bytes: Of an element of the KV cache.
        num_blocks: KV blocks of the first group that there are to be.
    """
    counts = block_mix(config, model).of(num_blocks)
    of_window = dict(zip(model.windows, counts, strict=True))
    sizes = (config.cache.block_size, config.speculative.max_drafts, dtype_bytes)
    of_row = state_bytes_per_row(model, *sizes, has_snapshots=num_snapshots(config) > 0)
    num_rows = num_state_rows(config)
    layer_bytes = [
        size.weight_bytes
        + num_rows * row_bytes
        + (config.cache.block_size * token_bytes * of_window[layer.attention.window] if layer.attention else 0)
        for size, row_bytes, token_bytes, layer in zip(
            layer_sizes(model, dtype_bytes),
            of_row,
            kv_bytes_per_token(model, kv_dtype_bytes),
            model.attention,
            strict=True,
        )
    ]
    return LayerRoom(layer_bytes, [stage.share_bytes - stage.taken_bytes - stage.kv(counts) for stage in memory])


RoomFor = Callable[[float], LayerRoom]
"""Returns the room for layers where so many requests are to run at once."""


def fastest_partition(
    costs: Sequence[StepCosts], room: LayerRoom | None = None, begins: Sequence[int] | None = None
) -> list[int]:
    """Return the number of layers of each stage that minimizes the slowest stage's cost, every stage with at least one.

    Solved exactly, by two dynamic programs over prefixes: the first finds the least cost that the slowest stage can
    have. Of all partitions with that cost, the second finds the one with the least sum of squared stage costs, so that
    no other stage is slower than it need be.

    Args:
        costs: Of a step, for each of P stages, in one unit of time or bytes.
        room: What layers take of the stages' memory; None: no limit.
        begins: The layers that stages may begin with, the first one among them, ascending; None: any.

    Raises:
        ConfigError: fewer layers than stages, or fewer that stages may begin with.
        ResourceError: the stages' memory does not hold all layers.
    """
    num_stages = len(costs)
    num_layers = len(costs[0].layers)
    if num_stages > num_layers:
        raise ConfigError(
            "more stages than layers",
            got=f"num_stages={num_stages}",
            expected=f"at most {num_layers}, the model's layers",
            hint="every stage holds at least one layer",
        )
    begins = range(num_layers) if begins is None else begins
    if num_stages > len(begins):
        raise ConfigError(
            "more stages than the model can be cut into: layers attend to keys and values of others",
            got=f"num_stages={num_stages}",
            expected=_possible_cuts(begins),
            hint="a layer and those that take its keys and values are on one stage",
        )
    prefixes = [[0.0, *accumulate(of_stage.layers)] for of_stage in costs]
    taken = [0, *accumulate([0] * num_layers if room is None else room.layer_bytes)]
    limits = [0] * num_stages if room is None else room.stage_bytes

    def cost(stage: int, start: int, end: int) -> float:
        of_stage, prefix = costs[stage], prefixes[stage]
        return (
            prefix[end]
            - prefix[start]
            + (of_stage.first_stage if stage == 0 else 0.0)
            + (of_stage.last_stage if stage == num_stages - 1 else 0.0)
        )

    def starts(stage: int, end: int) -> Sequence[int]:
        first = max(stage, bisect_left(taken, taken[end] - limits[stage]))
        return begins[bisect_left(begins, first) : bisect_left(begins, end)]

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

"""Cutting the layers into stages so that the slowest stage is as fast as can be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from raypp.errors import ConfigError


def partition_layers(
    layer_costs: Sequence[float], num_stages: int, *, first_stage_cost: float = 0.0, last_stage_cost: float = 0.0
) -> list[int]:
    """Return the number of layers of each stage that minimizes the slowest stage's cost, every stage with at least one.

    Solved exactly by dynamic programming over prefixes; of equal solutions, the one with the least sum of squared stage
    costs, so that no stage is slower than it need be.

    Args:
        layer_costs: Of each layer, in any unit of time or bytes.
        num_stages: P.
        first_stage_cost: What the first stage does besides its layers (the embedding), in the same unit.
        last_stage_cost: What the last stage does besides its layers (norm, LM head, sampling).

    Raises:
        ConfigError: fewer layers than stages.
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

    def stage_cost(stage: int, start: int, end: int) -> float:
        cost = prefix[end] - prefix[start]
        if stage == 0:
            cost += first_stage_cost
        if stage == num_stages - 1:
            cost += last_stage_cost
        return cost

    # best[end] = (slowest stage, sum of squares, cuts) over the stages so far, which hold layers [0, end)
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(num_stages):
        layers_left = num_stages - stage - 1
        reached: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for end in range(stage + 1, num_layers - layers_left + 1):
            reached[end] = min(
                (max(slowest, cost), squares + cost**2, (*cuts, end))
                for start, (slowest, squares, cuts) in best.items()
                if start < end
                for cost in (stage_cost(stage, start, end),)
            )
        best = reached
    cuts = best[num_layers][2]
    return [end - start for start, end in zip((0, *cuts), cuts, strict=False)]

"""The layer partition, against brute force."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypp.errors import ConfigError, ResourceError
from raypp.models.config import load_model_config
from raypp.models.registry import resolve_model_path
from raypp.plan.cost_model import StepCosts, estimated_costs
from raypp.plan.layer_partition import LayerRoom, even_partition, fastest_partition


def _partition(layers, num_stages, *, first=0.0, last=0.0, room=None, begins=None):
    return fastest_partition([StepCosts(layers=layers, first_stage=first, last_stage=last)] * num_stages, room, begins)


def _stage_costs(layers, costs, first, last):
    starts = [sum(layers[:i]) for i in range(len(layers))]
    stages = [sum(costs[start : start + count]) for start, count in zip(starts, layers, strict=True)]
    stages[0] += first
    stages[-1] += last
    return stages


@st.composite
def _problems(draw):
    costs = draw(st.lists(st.integers(1, 20), min_size=1, max_size=9))
    num_stages = draw(st.integers(1, min(5, len(costs))))
    limits = draw(st.none() | st.lists(st.integers(1, 9), min_size=num_stages, max_size=num_stages))
    later = sorted(draw(st.sets(st.sampled_from(range(1, len(costs))), min_size=num_stages - 1))) if costs[1:] else []
    return costs, num_stages, draw(st.integers(-5, 20)), draw(st.integers(-5, 40)), limits, later


@given(_problems())
def test_no_other_partition_is_better(problem):
    costs, num_stages, first, last, limits, later = problem
    possible = [
        layers
        for cuts in combinations(later, num_stages - 1)
        for layers in [[b - a for a, b in pairwise((0, *cuts, len(costs)))]]
        if limits is None or all(count <= limit for count, limit in zip(layers, limits, strict=True))
    ]
    room = limits and LayerRoom([1] * len(costs), limits)
    options = {"first": first, "last": last, "room": room, "begins": [0, *later]}
    if not possible:
        with pytest.raises(ResourceError, match="model does not fit"):
            _partition(costs, num_stages, **options)
        return
    layers = _partition(costs, num_stages, **options)
    assert layers in possible

    def quality(layers):
        stages = _stage_costs(layers, costs, first, last)
        return max(stages), sum(cost**2 for cost in stages)

    assert quality(layers) == min(quality(other) for other in possible)


def test_the_lm_head_takes_layers_from_the_last_stage():
    assert _partition([1.0] * 28, 2, last=10.0) == [19, 9]
    assert _partition([1.0] * 36, 4, last=3.2) == [10, 10, 10, 6]


def test_equal_layers_are_cut_evenly():
    assert sorted(_partition([1.0] * 10, 4)) == [2, 2, 3, 3]


def test_more_stages_than_layers_is_refused():
    with pytest.raises(ConfigError, match="more stages than layers"):
        _partition([1.0] * 3, 4)
    with pytest.raises(ConfigError, match=r"num_stages=4; expected: at most 3 stages, .* with one of layers 2, 4;"):
        _partition([1.0] * 6, 4, begins=[0, 2, 4])


def test_even_and_estimated_splits():
    assert even_partition(10, 4) == [3, 3, 2, 2]
    model = load_model_config(resolve_model_path("tiny"))
    for on_gpu in (False, True):  # the fixed times alone, on a GPU
        assert fastest_partition([estimated_costs(model, 4, on_gpu=on_gpu)] * 2) == [4, 2]

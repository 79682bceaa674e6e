"""The layer partition, against brute force."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypp.errors import ConfigError
from raypp.stage.partition import partition_layers


def _slowest(layers, costs, first, last):
    starts = [sum(layers[:i]) for i in range(len(layers))]
    stages = [sum(costs[start : start + count]) for start, count in zip(starts, layers, strict=True)]
    stages[0] += first
    stages[-1] += last
    return max(stages)


@given(
    costs=st.lists(st.integers(1, 20), min_size=1, max_size=9),
    num_stages=st.integers(1, 5),
    first=st.integers(0, 20),
    last=st.integers(0, 40),
)
def test_no_other_partition_is_faster(costs, num_stages, first, last):
    if num_stages > len(costs):
        return
    layers = partition_layers(costs, num_stages, first_stage_cost=first, last_stage_cost=last)
    assert len(layers) == num_stages
    assert sum(layers) == len(costs)
    assert min(layers) >= 1
    best = min(
        _slowest([b - a for a, b in zip((0, *cuts), (*cuts, len(costs)), strict=True)], costs, first, last)
        for cuts in combinations(range(1, len(costs)), num_stages - 1)
    )
    assert _slowest(layers, costs, first, last) == best


def test_the_lm_head_takes_layers_from_the_last_stage():
    assert partition_layers([1.0] * 28, 2, last_stage_cost=10.0) == [19, 9]
    assert partition_layers([1.0] * 36, 4, last_stage_cost=3.2) == [10, 10, 10, 6]


def test_equal_layers_are_cut_evenly():
    assert sorted(partition_layers([1.0] * 10, 4)) == [2, 2, 3, 3]


def test_more_stages_than_layers_is_refused():
    with pytest.raises(ConfigError, match="more stages than layers"):
        partition_layers([1.0] * 3, 4)

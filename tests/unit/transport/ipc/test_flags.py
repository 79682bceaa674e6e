"""Flags of 32 bits hold step ids that grow for ever."""

from __future__ import annotations

import numpy as np
import pytest
from fake_stream_device import has_reached

from raypp.transport.ipc.ipc_ends import INITIAL_VALUE, far_value, flag_value

STARTS = [0, 1, 100, (1 << 31) - 2, 1 << 31, (1 << 32) - 2, (1 << 32) - 1, 1 << 32, (1 << 40) + 7]


def as_cuda_compares(flag: int, value: int) -> bool:
    """What CUDA documents for a cyclic greater-or-equal wait."""
    return bool((np.array([flag], np.uint32) - np.array([value], np.uint32)).view(np.int32)[0] >= 0)


@pytest.mark.parametrize("step_id", STARTS)
def test_a_flag_has_reached_its_own_step_and_all_before_but_none_after(step_id: int) -> None:
    flag = flag_value(step_id)
    assert 0 <= flag < 1 << 32
    for distance in (0, 1, 2, 1000, 1 << 20):
        assert has_reached(flag, flag_value(step_id - distance))
    for distance in (1, 2, 1000, 1 << 20):
        assert not has_reached(flag, flag_value(step_id + distance))


@pytest.mark.parametrize("flag", [flag_value(start) for start in STARTS])
@pytest.mark.parametrize("value", [flag_value(start) for start in STARTS])
def test_comparison_is_that_of_cuda(flag: int, value: int) -> None:
    assert has_reached(flag, value) == as_cuda_compares(flag, value)


def test_before_the_first_step_no_message_is_there_and_all_slots_are_free() -> None:
    assert not has_reached(INITIAL_VALUE, flag_value(0))
    for step_id in range(8):
        assert has_reached(INITIAL_VALUE, flag_value(step_id - 8))
    assert not has_reached(INITIAL_VALUE, flag_value(8 - 8))


@pytest.mark.parametrize("step_id", [-1, *STARTS])
def test_a_far_value_ends_the_waits_of_all_steps_in_flight(step_id: int) -> None:
    for distance in range(-1000, 1000):
        assert has_reached(far_value(step_id), flag_value(step_id + distance))

"""Step ids in 32-bit flags: what a flag in device memory holds, and when a wait on it ends.

A flag holds the newest step that its writer is done with. CUDA compares flags as if they lay on a circle (it waits for
`int32(flag - value) >= 0`), so step ids may grow past 32 bits as long as no flag lags half the circle behind.
"""

from __future__ import annotations

from raypp.messages import NO_STEP

_CIRCLE = 1 << 32
_FAR = 1 << 30  # further ahead than any step in flight, and still less than half the circle


def flag_value(step_id: int) -> int:
    """Return what a flag holds when its writer is done with `step_id`. Unsigned, 32 bits."""
    return step_id % _CIRCLE


INITIAL_VALUE = flag_value(NO_STEP)
"""What a flag holds before the first step."""


def has_reached(flag: int, value: int) -> bool:
    """Return whether a wait for `value` ends when the flag holds `flag`, as CUDA decides it."""
    return (flag - value) % _CIRCLE < _CIRCLE // 2


def far_value(step_id: int) -> int:
    """Return a value that ends every wait for steps near `step_id`, those in flight and those still to come."""
    return flag_value(step_id + _FAR)

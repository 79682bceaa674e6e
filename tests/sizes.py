"""How much a test does: little in CI, all of it with TEST_SIZES=all, as `make soak` has it (tests/soak)."""

from __future__ import annotations

import os
from typing import TypeVar

IS_FULL = os.environ.get("TEST_SIZES") == "all"
T = TypeVar("T")


def sized(in_ci: T, in_full: T) -> T:
    """Return the first in CI, the second in soak."""
    return in_full if IS_FULL else in_ci

"""What the ends of one stage share goes with the last of them."""

from __future__ import annotations

from collections.abc import Callable


def once(function: Callable[[], None]) -> Callable[[], None]:
    """Return a function whose first call calls `function`, and whose others do nothing."""
    pending = [function]

    def call() -> None:
        while pending:
            pending.pop()()

    return call


def after_last(count: int, function: Callable[[], None]) -> Callable[[], None]:
    """Return a function whose `count`-th call calls `function`."""
    left = [None] * count

    def call() -> None:
        left.pop()
        if not left:
            function()

    return call

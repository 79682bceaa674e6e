"""Limits how long the grammar process may take and how often it may fail, with the errors that requests get then."""

from __future__ import annotations

import time
from collections import deque

from raypp.errors import RequestError

MASK_TIMEOUT_S = 20.0
"""A mask takes microseconds. One that takes this long is of a grammar that grows worse with every token."""

ANSWER_TIMEOUT_S = 10.0
"""Beyond what a constraint may take to compile: the process ends it then, and says so."""

MAX_DEATHS = 2
"""Of processes that were making a request's mask: one may have been killed from outside at that moment."""

MAX_RESTARTS = 6
RESTARTS_WINDOW_S = 300.0


class RestartLimit:
    """Says when the grammar process has failed so often that it is not worth another start."""

    def __init__(self) -> None:
        """Count none yet."""
        self._times_s: deque[float] = deque(maxlen=MAX_RESTARTS)

    def note(self) -> None:
        """Count a failure."""
        self._times_s.append(time.monotonic())

    def error(self) -> RequestError | None:
        """Return what a request is told that needs the process now; None if it may have it."""
        if len(self._times_s) < MAX_RESTARTS or time.monotonic() - self._times_s[0] > RESTARTS_WINDOW_S:
            return None
        return RequestError(
            "the grammar process keeps failing",
            got=f"{MAX_RESTARTS} failures within {RESTARTS_WINDOW_S:g} s",
            expected=f"fewer; it is tried again when the first of them is {RESTARTS_WINDOW_S:g} s ago",
            hint="the driver's log says how it failed; some grammar may be at fault",
        )


def too_slow(took_s: float, num_tokens: int) -> RequestError:
    """Return the error of a text whose mask takes too long."""
    return RequestError(
        "a grammar takes too long to compute masks for",
        got=f"no mask within {took_s:.0f} s, after {num_tokens} tokens",
        expected=f"at most {MASK_TIMEOUT_S:g} s",
        hint="a grammar with many ways to read the same text grows slow; write it without",
        param="structured_outputs",
    )


def died_over_it(num_deaths: int) -> RequestError:
    """Return the error of a text over which the process dies."""
    return RequestError(
        "the grammar process died over this request",
        got=f"{num_deaths} times while it made a mask of this text",
        hint="simplify the grammar",
        param="structured_outputs",
    )


def never_answered(timeout_s: float) -> RequestError:
    """Return the error of a constraint that two processes were to compile."""
    return RequestError(
        "structured_outputs: this grammar was not compiled",
        got=f"no answer from the grammar process within {timeout_s:g} s, twice",
        expected="an answer within grammar_compile_timeout_s and a little more",
        hint="send the request again; the machine may be overloaded, or the process was stopped",
        param="structured_outputs",
    )


def not_started(reason: str) -> RequestError:
    """Return the error of requests that need the process when it cannot be started."""
    return RequestError(
        "the grammar process cannot be started",
        got=reason,
        hint="give the driver more file descriptors, processes or memory, and send the request again",
    )

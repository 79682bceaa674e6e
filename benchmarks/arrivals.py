"""Requests that arrive at random moments, alone or as turns of conversations, and what each of them waited for."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Stream = Callable[[list[int], int], AsyncIterator[Sequence[int]]]
"""Runs a request with a prompt for exactly so many tokens, and yields at every piece of output that arrives all token
ids so far; none where they are not known. Raises ValueError when it was another number, see `check_num_tokens`."""


class Turn(NamedTuple):
    """A request of a conversation."""

    token_ids: list[int]
    """What its prompt adds to all that was said before."""
    num_tokens: int
    """Of its answer."""


@dataclass
class RequestTimes:
    """When the pieces of one request's output came, seconds from the moment at which it was due."""

    num_tokens: int
    pieces_s: list[float] = field(default_factory=list)
    late_s: float = 0.0
    """How much later than due it was sent: not the server's fault, but counted."""
    is_streamed: bool = True
    """Else `pieces_s` has the first token's time and the last one's alone."""

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.pieces_s[0]

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first."""
        return (self.pieces_s[-1] - self.pieces_s[0]) / max(1, self.num_tokens - 1)

    @property
    def e2e_s(self) -> float:
        """Time to the last token."""
        return self.pieces_s[-1]

    @property
    def itls_s(self) -> list[float]:
        """The times between pieces, of one token or, with speculation, more; none where they were not streamed."""
        if not self.is_streamed:
            return []
        return [after - before for before, after in zip(self.pieces_s, self.pieces_s[1:], strict=False)]


async def run_arrivals(
    stream: Stream, conversations: Sequence[Sequence[Turn]], rate: float, rng: random.Random
) -> list[RequestTimes]:
    """Begin conversations at the moments of a Poisson process; return their requests' times once all are done.

    Args:
        stream: Where to.
        conversations: The requests of each: the next one is due when the one before has been answered.
        rate: Requests per second on average; infinite sends all at once.
        rng: Draws the moments.

    Raises:
        Whatever a request raises.
    """
    due_s, moments = 0.0, []
    for _ in conversations:
        moments.append(due_s)
        due_s += 0.0 if math.isinf(rate) else rng.expovariate(rate)
    begun = time.perf_counter()
    found = await asyncio.gather(
        *(_converse(stream, turns, begun + due) for turns, due in zip(conversations, moments, strict=True))
    )
    return [times for of_one in found for times in of_one]


async def _converse(stream: Stream, turns: Sequence[Turn], due: float) -> list[RequestTimes]:
    said: list[int] = []
    found = []
    await asyncio.sleep(due - time.perf_counter())
    for turn in turns:
        said = said + turn.token_ids
        times = RequestTimes(turn.num_tokens)
        answer: Sequence[int] = ()
        times.late_s = time.perf_counter() - due
        async for piece in stream(said, turn.num_tokens):
            times.pieces_s.append(time.perf_counter() - due)
            answer = piece
        said = [*said, *answer]
        due = time.perf_counter()
        found.append(times)
    return found


def check_num_tokens(got: int, expected: int) -> None:
    """Raise ValueError if a request brought another number of tokens: its times would say nothing."""
    if got != expected:
        raise ValueError(f"a request was to bring {expected} tokens, and brought {got}")


def summarize(requests: Sequence[RequestTimes]) -> dict[str, Mapping[str, float]]:
    """Return mean, median and 99th percentile of every kind of time, ms."""
    samples = {
        "ttft": [request.ttft_s for request in requests],
        "tpot": [request.tpot_s for request in requests if request.num_tokens > 1],
        "itl": [itl for request in requests for itl in request.itls_s],
        "e2e": [request.e2e_s for request in requests],
        "late": [request.late_s for request in requests],
    }
    return {
        f"{name}_ms": {
            "mean": statistics.fmean(values) * 1e3,
            "median": statistics.median(values) * 1e3,
            "p99": percentile(values, 0.99) * 1e3,
        }
        for name, values in samples.items()
        if values
    }


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share, 0..1, of all values does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]

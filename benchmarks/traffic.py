"""What arrives at an engine: how many requests, when, of which lengths, what they begin with, how often they go on.

Traffic is a name of `TRAFFIC`, or one with some fields in other values, or fields alone:

    offline    online-16,requests=64    rate=8,requests=100,input=512,output=lognormal:64:1:512

Lengths are `512` (all alike), `uniform:16:3000` (the least, the most) or `lognormal:400:1.2:3000` (median, sigma, the
most): a long tail. The same traffic and seed give the same requests.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import pairwise, takewhile
from typing import Any

from arrivals import Turn

NUM_PREFIXES = 8
"""Beginnings that requests share, if they share any."""


@dataclass(frozen=True)
class Lengths:
    """How numbers of tokens are distributed."""

    kind: str
    """uniform or lognormal"""
    first: float
    """The least; of a log-normal distribution the median."""
    most: int
    sigma: float = 0.0
    """Of the logarithm."""

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Return what a text means; see the module.

        Raises:
            ValueError: it means nothing.
        """
        kind, *numbers = text.split(":") if ":" in text else ("uniform", text, text)
        try:
            if kind == "uniform":
                least, most = map(int, numbers)
                found = cls(kind, least, most)
            else:
                median, sigma, most = float(numbers[0]), float(numbers[1]), int(numbers[2])
                found = cls(kind, median, most, sigma)
        except (ValueError, IndexError):
            found = cls("", 0, 0)
        if found.kind not in ("uniform", "lognormal") or not 1 <= found.first <= found.most or len(numbers) > 3:
            raise ValueError(f"no lengths: {text!r}; 512, uniform:LEAST:MOST or lognormal:MEDIAN:SIGMA:MOST are")
        return found

    def draw(self, rng: random.Random) -> int:
        """Return a number of tokens, at least 1."""
        if self.kind == "uniform":
            return rng.randint(int(self.first), self.most)
        return max(1, min(self.most, round(rng.lognormvariate(math.log(self.first), self.sigma))))

    def __str__(self) -> str:
        """Return the text that means this."""
        if self.kind == "uniform":
            return str(self.most) if self.first == self.most else f"uniform:{self.first:g}:{self.most}"
        return f"lognormal:{self.first:g}:{self.sigma:g}:{self.most}"


@dataclass(frozen=True)
class Traffic:
    """Requests, or conversations of several."""

    requests: int = 400
    """Conversations, if these have several turns."""
    rate: float = math.inf
    """Of arrivals per second, in the mean of a Poisson process; infinite: all at once."""
    input: Lengths = Lengths("uniform", 16, 3000)
    """Tokens of a prompt, of a later turn those that are new."""
    output: Lengths = Lengths("uniform", 16, 512)
    """Tokens of an answer."""
    shared: float = 0.0
    """The part of a first prompt, 0..1, that is the beginning of one of `NUM_PREFIXES` texts."""
    system: int = 0
    """Tokens of a system prompt, with which all begin."""
    turns: int = 1
    """Requests of a conversation: each begins with all that was said before, and is sent when that is answered."""
    sampling: str = "greedy"
    """A name of `workload.SAMPLING`, or mix."""

    @property
    def max_len(self) -> int:
        """The most tokens of a request, its answer included."""
        return self.system + self.turns * (self.input.most + self.output.most)

    @property
    def shares(self) -> bool:
        """Whether requests find anything in a prefix cache."""
        return self.shared > 0 or self.system > 0 or self.turns > 1

    def conversations(self, vocab_size: int, seed: int) -> list[list[Turn]]:
        """Return the turns of every conversation."""
        rng = random.Random(seed)
        prefixes = [_tokens(self.input.most, vocab_size, rng) for _ in range(NUM_PREFIXES * self.shares)]
        system = _tokens(self.system, vocab_size, rng)
        return [list(self._turns(system, prefixes, vocab_size, rng)) for _ in range(self.requests)]

    def _turns(
        self, system: list[int], prefixes: list[list[int]], vocab_size: int, rng: random.Random
    ) -> Iterator[Turn]:
        for index in range(self.turns):
            num_tokens, num_shared = self.input.draw(rng), 0
            beginning = [] if index else list(system)
            if self.shared and not index:
                num_shared = round(self.shared * num_tokens)
                beginning += rng.choice(prefixes)[:num_shared]
            yield Turn(beginning + _tokens(num_tokens - num_shared, vocab_size, rng), self.output.draw(rng))

    def num_distinct_tokens(self, vocab_size: int, seed: int) -> int:
        """Return the tokens of all texts at their ends, beginnings that several share counted once: what KV is of."""
        conversations = self.conversations(vocab_size, seed)
        num_said = sum(len(turn.token_ids) + turn.num_tokens for turns in conversations for turn in turns)
        firsts = sorted(turns[0].token_ids for turns in conversations)
        return num_said - sum(_num_alike(a, b) for a, b in pairwise(firsts))

    def as_text(self) -> str:
        """Return the text that means this."""
        return ",".join(f"{each.name}={getattr(self, each.name)}" for each in fields(self))


_POISSON = Traffic(input=Lengths("uniform", 64, 1500), output=Lengths("uniform", 32, 256))
_TAIL = Traffic(input=Lengths.parse("lognormal:400:1.2:3000"), output=Lengths.parse("lognormal:120:1.0:512"))
_SHORT = Lengths("uniform", 8, 32)
TRAFFIC: dict[str, Traffic] = {
    "offline": Traffic(),
    "online-16": replace(_POISSON, rate=16.0, requests=192),
    "online-40": replace(_POISSON, rate=40.0, requests=480),
    "offline-tail": _TAIL,
    "online-tail": replace(_TAIL, rate=24.0, requests=288),
    "shared-50": replace(_TAIL, shared=0.5),
    "shared-90": replace(_TAIL, shared=0.9),
    "turns": replace(_TAIL, requests=100, turns=4, input=Lengths.parse("lognormal:200:1.0:600")),
    "turns-system": Traffic(
        requests=8, system=4000, turns=5, input=Lengths("uniform", 50, 200), output=Lengths("uniform", 100, 200)
    ),
    "turns-90": Traffic(requests=100, turns=8, shared=0.9, input=Lengths.parse("uniform:160:480"), output=_SHORT),
    "sampled": replace(_POISSON, rate=16.0, requests=192, sampling="qwen3"),
}
"""Twelve seconds of arrivals, or some hundred requests at once."""


def parse_traffic(text: str) -> Traffic:
    """Return what a text means; see the module.

    Raises:
        ValueError: it means nothing.
    """
    first, *rest = text.split(",")
    traffic = TRAFFIC.get(first, Traffic())
    if "=" in first:
        rest = [first, *rest]
    elif first not in TRAFFIC:
        raise ValueError(f"no traffic: {first!r}; {', '.join(TRAFFIC)} are, or FIELD=VALUE,...")
    known = {each.name for each in fields(Traffic)}
    changes: dict[str, Any] = {}
    for part in rest:
        name, _, value = part.partition("=")
        if name not in known:
            raise ValueError(f"traffic has no {name!r}; {', '.join(sorted(known))} are its fields")
        readers: dict[str, Any] = {
            "requests": int,
            "turns": int,
            "system": int,
            "rate": float,
            "shared": float,
            "sampling": str,
        }
        changes[name] = readers.get(name, Lengths.parse)(value)
    return replace(traffic, **changes)


def _num_alike(a: list[int], b: list[int]) -> int:
    """Return how many tokens two texts have in common from their beginnings on."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _tokens(count: int, vocab_size: int, rng: random.Random) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(count)]

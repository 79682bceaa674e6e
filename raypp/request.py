"""A request, from where it is made to its end, and what a step changed about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from raypp.messages import Int32s, TokenLogprobs
from raypp.prompt_items import PromptItems
from raypp.types import FinishReason, SamplingParams

NO_TOKENS: frozenset[int] = frozenset()


class DraftCounts:
    """Counts what became of the drafts of one request, or of all. Cheap, since it counts every row of every step."""

    __slots__ = ("_by_accepted", "_by_drafted")

    def __init__(self, max_drafts: int) -> None:
        self._by_drafted = [0] * (max_drafts + 1)  # [d]: row-steps that verified d drafts
        self._by_accepted = [0] * (max_drafts + 1)  # [a]: row-steps that accepted a of them

    def count(self, num_drafted: int, num_accepted: int) -> None:
        """Count a row-step that verified at least one draft."""
        self._by_drafted[num_drafted] += 1
        self._by_accepted[num_accepted] += 1

    @property
    def num_rows(self) -> int:
        """Row-steps."""
        return sum(self._by_drafted)

    @property
    def num_drafted(self) -> int:
        """Drafts that were verified."""
        return sum(self.drafted_by_position)

    @property
    def num_accepted(self) -> int:
        """Drafts that were accepted."""
        return sum(self.accepted_by_position)

    @property
    def drafted_by_position(self) -> list[int]:
        """How often the first, second, ... draft of a row was verified, [K_max]."""
        return _at_least(self._by_drafted)

    @property
    def accepted_by_position(self) -> list[int]:
        """How often the first, second, ... draft of a row was accepted, [K_max]."""
        return _at_least(self._by_accepted)


@dataclass(eq=False, slots=True)
class Request:
    """One continuation of one prompt, validated: what a client makes, what travels, and what the scheduler runs.

    The first block is fixed where the request is made; the second is the driver's. One that an engine before this one
    has begun comes with its `output_token_ids`, none of which has ended it, and is taken as one that was preempted.
    """

    request_id: str  # unique among the requests of all clients
    prompt_token_ids: Int32s  # [P]
    params: SamplingParams
    seed: int  # params.seed, or the one drawn for the request
    eos_token_ids: frozenset[int] = NO_TOKENS
    bad_word_token_ids: tuple[tuple[int, ...], ...] = ()  # params.bad_words as tokens
    priority: int = 0  # smaller is served first
    goes_first: bool = False  # before all others, whatever their priority
    items: PromptItems | None = None  # the images of the prompt
    cache_salt: str = ""  # requests of different salts share nothing of the prefix cache
    handle: int = 0  # the client's own number of it, int64; what outputs name it by
    is_streamed: bool = False  # whether the client wants each token as it comes; else they may be held for a moment
    output_token_ids: list[int] = field(default_factory=list)

    client: bytes = b""  # where its outputs go; opaque to the scheduler
    arrival_ns: int = 0  # monotonic; opaque to the scheduler, which has no clock
    queue_us: int = 0  # from arrival to the first row; set by the engine loop, likewise opaque
    num_earlier_tokens: int = field(init=False)  # of the output tokens, those that it came with
    finish_reason: FinishReason = FinishReason.NONE
    stop_token_id: int = -1  # the entry of params.stop_token_ids that ended it
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    num_preemptions: int = 0
    draft_counts: DraftCounts | None = None  # None until drafts of it are verified

    def __post_init__(self) -> None:
        self.num_earlier_tokens = len(self.output_token_ids)

    @property
    def num_new_tokens(self) -> int:
        """Output tokens that it has got here."""
        return len(self.output_token_ids) - self.num_earlier_tokens

    @property
    def is_admitted_again(self) -> bool:
        """Whether it has had a row before, here or in the engine that began it."""
        return bool(self.num_preemptions or self.num_earlier_tokens)

    @property
    def has_grammar(self) -> bool:
        """Whether its text has to follow a grammar."""
        return self.params.structured_outputs is not None


class LogprobRows(NamedTuple):
    """Where a request's log-probabilities are among those of a step."""

    of_step: TokenLogprobs
    start: int
    end: int
    width: int  # the columns that are the request's

    @property
    def own(self) -> TokenLogprobs:
        """The request's."""
        rows, (token_ids, logprobs, ranks) = slice(self.start, self.end), self.of_step
        return TokenLogprobs(token_ids[rows, : self.width], logprobs[rows, : self.width], ranks[rows])


@dataclass(slots=True)  # not frozen: that would triple the time to make one
class RequestUpdate:
    """What a collected step brought to one request. It stays as it is when later steps change the request."""

    request: Request
    new_token_ids: list[int]
    finish_reason: FinishReason  # not NONE: the request ended with these tokens
    logprobs: LogprobRows | None = None  # of the new tokens, if the request asks for them
    prompt_logprobs: LogprobRows | None = None  # of prompt tokens that come after those reported before
    # Of a request under a grammar, which gets an update for each of its steps: the drafts after its newest token.
    draft_ids: list[int] | None = None

    @property
    def is_news(self) -> bool:
        """Whether the client has to hear of it."""
        return bool(self.new_token_ids or self.prompt_logprobs is not None or self.finish_reason)


def _at_least(counts: list[int]) -> list[int]:
    """Return, for each number from 1 on, how often it was that number or more."""
    return list(accumulate(reversed(counts[1:])))[::-1]

"""A request as the scheduler sees it, and what a step changed about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from raypp.messages import Int32s, TokenLogprobs
from raypp.prompt_items import PromptItems
from raypp.scheduler.scheduler_stats import DraftCounts
from raypp.types import FinishReason, SamplingParams


@dataclass(eq=False, slots=True)
class Request:
    """One request, from admission to its end.

    The first block is fixed by whoever submits it; the rest belongs to the scheduler. One that an engine before this
    one has begun comes with its `output_token_ids`, and is taken as one that was preempted.
    """

    request_id: str
    prompt_token_ids: Int32s  # [P]
    params: SamplingParams
    seed: int  # params.seed, or the one drawn for it
    eos_token_ids: frozenset[int] = frozenset()
    bad_word_token_ids: tuple[tuple[int, ...], ...] = ()  # params.bad_words as tokens
    priority: int = 0  # smaller is served first
    goes_first: bool = False  # before all others, whatever their priority
    items: PromptItems | None = None  # the images of the prompt
    cache_salt: str = ""  # requests of different salts share no blocks
    client: bytes = b""  # whom to answer; opaque to the scheduler
    handle: int = 0  # the client's own number of it; opaque to the scheduler
    is_streamed: bool = False  # whether the client wants each token as it comes; opaque to the scheduler
    arrival_ns: int = 0  # monotonic; opaque to the scheduler, which has no clock
    queue_us: int = 0  # from arrival to the first row; set by whoever dispatches, likewise opaque

    output_token_ids: list[int] = field(default_factory=list)
    num_earlier_tokens: int = field(init=False)  # of these, the ones that it came with
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

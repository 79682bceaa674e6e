"""A request, from where it is made to its end, and what a step changed about it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

from raypp.errors import QueueFullError, RequestError
from raypp.messages import Int32s, TokenLogprobs
from raypp.prompt_items import EncoderItem, PromptItems, unique_items
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


REQUEST_BYTES = 4096
"""What a request takes in the driver beside its prompt and its images, counted generously."""

_RETRY_AFTER_S = 3


@dataclass(slots=True)
class _Pixels:
    item: EncoderItem
    num_requests: int = 0


class RequestMemory:
    """Counts what requests take.

    Args:
        max_bytes: What prompts and requests may take: 4 bytes per prompt token, and `REQUEST_BYTES` per request.
        max_pixel_bytes: What their images may.
    """

    def __init__(self, *, max_bytes: int, max_pixel_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_pixel_bytes = max_pixel_bytes
        self._requests: dict[Hashable, tuple[int, PromptItems | None]] = {}
        self._pixels: dict[bytes, _Pixels] = {}
        self.num_bytes = 0
        """That requests take, without pixels."""
        self.num_pixel_bytes = 0
        """Of their images."""

    def add(self, key: Hashable, request: Request, *, is_new: bool = True) -> PromptItems | None:
        """Count a request; return its images, those that are counted already as the objects that came first.

        Args:
            key: What it is removed by.
            request: It.
            is_new: Whether it may be refused for want of room. One that was admitted before is counted in any case.

        Raises:
            QueueFullError: there is no room for a new one now.
            RequestError: there never is.
        """
        request_id, items, size = request.request_id, request.items, REQUEST_BYTES + request.prompt_token_ids.nbytes
        used, limit = self.num_bytes, self._max_bytes
        _check_room(request_id, "memory of unfinished requests", size, used, "max_waiting_bytes", limit, is_new=is_new)
        if items is not None:
            items = self._add_pixels(request_id, items, is_new=is_new)
        self._requests[key] = size, items
        self.num_bytes += size
        return items

    def remove(self, key: Hashable) -> bool:
        """Forget a request; return whether it was counted."""
        if (counted := self._requests.pop(key, None)) is None:
            return False
        size, items = counted
        self.num_bytes -= size
        for item in () if items is None else unique_items(items.items):
            pixels = self._pixels[item.key]
            pixels.num_requests -= 1
            if not pixels.num_requests:
                del self._pixels[item.key]
                self.num_pixel_bytes -= pixels.item.patches.nbytes
        return True

    def _add_pixels(self, request_id: str, items: PromptItems, *, is_new: bool) -> PromptItems:
        unique = unique_items(items.items)
        new = [item for item in unique if item.key not in self._pixels]
        size = sum(item.patches.nbytes for item in new)
        used, limit = self.num_pixel_bytes, self._max_pixel_bytes
        _check_room(request_id, "memory of waiting images", size, used, "max_waiting_pixel_bytes", limit, is_new=is_new)
        for item in new:
            self._pixels[item.key] = _Pixels(item)
        self.num_pixel_bytes += size
        for item in unique:
            self._pixels[item.key].num_requests += 1
        return replace(items, items=tuple(self._pixels[item.key].item for item in items.items))


def _check_room(request_id: str, what: str, size: int, used: int, name: str, limit: int, *, is_new: bool) -> None:
    """Check that there is room for a request's `size` bytes.

    Raises:
        QueueFullError, RequestError: see `RequestMemory.add`.
    """
    if not size or used + size <= limit or (size <= limit and not is_new):
        return
    expected = f"at most {name} = {limit}"
    if size <= limit:
        raise QueueFullError(
            f"the {what} is full",
            retry_after_s=_RETRY_AFTER_S,
            got=f"{size} bytes more, {used} in use",
            expected=expected,
            hint=f"wait until others have ended, or raise {name}",
        )
    raise RequestError(
        f"the request does not fit into the {what}",
        request_id=request_id,
        got=f"{size} bytes",
        expected=expected,
        hint=f"send less in one request, or raise {name}",
    )

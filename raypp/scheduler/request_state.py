"""What the scheduler knows about an unfinished request: its row, blocks, and steps in flight."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from raypp.errors import RequestError
from raypp.messages import NO_STEP, Int32s, StepLogprobs, StepResult, TokenLogprobs, unpack
from raypp.request import LogprobRows, Request, RequestUpdate
from raypp.scheduler.limits import SchedulerLimits

NO_ROW = -1


@dataclass(frozen=True, eq=False, slots=True)
class ItemPin:
    """The items that the first stage keeps for one request while its prompt is computed."""

    keys: tuple[bytes, ...]
    end: int  # one past the last prompt position that reads any of it


@dataclass(eq=False, slots=True)
class BlockTable:
    """A request's blocks of one group: entry i holds the tokens at positions [i * block_size, (i + 1) * block_size)."""

    blocks: list[int]  # NULL_BLOCK before `first`
    first: int = 0  # what lies before it is seen by no token to come
    num_sent: int = 0  # leading entries that the stages know or never need

    @property
    def indices(self) -> range:
        """Of the entries that hold tokens."""
        return range(self.first, len(self.blocks))


@dataclass(eq=False, slots=True)
class RequestState:
    """One unfinished request: waiting, or running in a row.

    While steps that contain a row are in flight, only the stages know its true length. Known here is:

        num_tokens + num_in_flight_yields <= true length <= num_tokens + max_in_flight_tokens

    because a step that yields for the row brings at least one token and at most 1 + K. If a grammar's mask comes too
    late, it brings none. Then the lower bound is too high until the step is collected; a row near its limit waits for
    that.
    """

    request: Request
    arrival: int  # consecutive; smaller is older
    limit: int  # min(prompt + max_tokens, max_model_len): the tokens it may ever have
    end_token_ids: frozenset[int]  # EOS and stop tokens alike; a quick test before the exact one
    num_tokens: int  # known: the prompt and the output that was collected
    never_drafts: bool = False  # the draft head skips it: it yields one token, and nobody shares its blocks

    has_grammar: bool = field(init=False)

    row: int = NO_ROW  # NO_ROW while it waits
    num_prefill_tokens: int = 0  # known tokens when the row was taken: what its prefill computes
    num_prefilled_tokens: int = 0  # of these, found in the prefix cache or dispatched

    tables: list[BlockTable] = field(default_factory=list)  # by group of layers
    num_held_tokens: int = 0  # that the shortest of them has blocks for
    has_new_blocks: bool = False  # whether the next plan carries entries of them
    block_hashes: list[bytes] = field(default_factory=list)  # of leading full blocks, as far as they were needed
    num_offered_blocks: int = 0  # leading blocks that came from the prefix cache or were offered to it
    num_shared_blocks: int = 0  # leading blocks that others have, if a snapshot is to stand behind them
    num_wanted_blocks: tuple[int, ...] = ()  # by group: free blocks that the last failed attempt to admit it needed

    item_pin: ItemPin | None = None  # from the order of its images to the dispatch of the last chunk with one

    num_scored_tokens: int = 0  # prompt tokens, without the first, whose log-probabilities were reported

    num_in_flight_yields: int = 0  # steps in flight that bring it tokens
    max_in_flight_tokens: int = 0  # the most tokens that these may bring
    last_step: int = NO_STEP  # the last dispatched step that contains it
    last_yield_step: int = NO_STEP  # ... and brings it tokens

    def __post_init__(self) -> None:
        self.has_grammar = self.request.has_grammar

    @property
    def is_prefilling(self) -> bool:
        """Whether chunks of its prefill remain to be dispatched."""
        return self.num_prefilled_tokens < self.num_prefill_tokens

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of its prompt remain to be reported."""
        request = self.request
        return request.params.prompt_logprobs is not None and (
            self.num_scored_tokens < len(request.prompt_token_ids) - 1
        )

    def token_ids(self, start: int, end: int) -> Int32s:
        """Return its known tokens at positions `start` to `end`, the latter excluded; a view where it can be."""
        prompt, output = self.request.prompt_token_ids, self.request.output_token_ids
        num_prompt = len(prompt)
        if end <= num_prompt:
            return prompt[start:end]
        grown = np.array(output[max(start - num_prompt, 0) : end - num_prompt], np.int32)
        return np.concatenate((prompt[start:], grown)) if start < num_prompt else grown


def token_limit(request: Request, limits: SchedulerLimits) -> int:
    """Return the most tokens that the request may ever have, prompt and output together.

    Raises:
        RequestError: its prompt is empty or too long, or the KV cache too small for it even when it is alone.
    """
    request_id, num_prompt_tokens = request.request_id, len(request.prompt_token_ids)
    if not num_prompt_tokens:
        raise RequestError("the prompt is empty", request_id=request_id, got="0 tokens", expected="at least one token")
    if num_prompt_tokens >= limits.max_model_len:
        raise RequestError(
            "the prompt is too long",
            request_id=request_id,
            got=f"{num_prompt_tokens} tokens",
            expected=f"fewer than max_model_len = {limits.max_model_len}, which counts the output too",
            hint="shorten the prompt or raise max_model_len",
        )
    limit = min(num_prompt_tokens + request.params.max_tokens, limits.max_model_len)
    if limit > limits.max_request_tokens:
        raise RequestError(
            "the KV cache cannot hold this request even when it is alone",
            request_id=request_id,
            got=f"{num_prompt_tokens} prompt tokens and max_tokens = {request.params.max_tokens}",
            expected=f"at most {limits.max_request_tokens} tokens, prompt and output together",
            hint="lower max_tokens, or give the KV cache more blocks",
        )
    return limit


def check_begun(request: Request, limit: int, end_token_ids: frozenset[int], vocab_size: int) -> None:
    """Check the tokens that a request comes with from an engine before this one.

    Args:
        request: The request.
        limit: Its `token_limit`.
        end_token_ids: Its `end_token_ids`.
        vocab_size: V.

    Raises:
        RequestError: they have ended it, or are not the model's.
    """
    token_ids, most = request.output_token_ids, limit - len(request.prompt_token_ids) - 1
    if len(token_ids) > most:
        raise RequestError(
            "the request has ended: it comes with all tokens that it may have",
            request_id=request.request_id,
            got=f"{len(token_ids)} output tokens",
            expected=f"at most {most}, so that one is left of max_tokens and of max_model_len",
            hint="hand over unfinished requests only",
        )
    if ending := end_token_ids.intersection(token_ids):
        raise RequestError(
            "the request has ended: it comes with a token that ends it",
            request_id=request.request_id,
            got=f"token {min(ending)} among its output tokens",
            expected="output tokens that end nothing",
            hint="hand over unfinished requests only",
        )
    unknown = [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]
    if unknown:
        raise RequestError(
            "an output token that the request comes with is not in the vocabulary",
            request_id=request.request_id,
            got=unknown[0],
            expected=f"0 to {vocab_size - 1}",
            hint="hand a request over to an engine of the same model",
        )


def end_token_ids(request: Request) -> frozenset[int]:
    """Return all tokens that end the request."""
    if not request.params.stop_token_ids and not request.params.ignore_eos:
        return request.eos_token_ids  # shared: a set for each request would take more memory than the rest of it
    stop = frozenset(request.params.stop_token_ids)
    return stop if request.params.ignore_eos else stop | request.eos_token_ids


class StepLogprobsReader:
    """Looks up the log-probabilities of one step's rows."""

    def __init__(self, result: StepResult, num_decode_rows: int, width: int) -> None:
        """Read a result.

        Args:
            result: Of the step; it must have log-probabilities.
            num_decode_rows: The step's decode rows, which come first.
            width: 1 + K, the positions of each decode row.
        """
        message = unpack(StepLogprobs, result.logprobs.data)
        self._output = TokenLogprobs(message.token_ids, message.logprobs, message.ranks)
        self._prompts = TokenLogprobs(message.prompt_token_ids, message.prompt_logprobs, message.prompt_ranks)
        indices = message.indices.tolist()
        lengths = [width if index < num_decode_rows else 1 for index in indices]
        self._first = dict(zip(indices, accumulate([0, *lengths]), strict=False))
        counts = message.prompt_counts.tolist()
        starts = zip(accumulate([0, *counts]), counts, message.prompt_starts.tolist(), strict=False)
        self._prompt = dict(zip(message.prompt_indices.tolist(), starts, strict=True))

    def update(self, state: RequestState, index: int, taken: list[int]) -> RequestUpdate:
        """Return what the step brought to a request, and count its prompt tokens that were reported.

        Args:
            state: The request.
            index: Of its row in the step.
            taken: Its new tokens, as far as they were kept.
        """
        params, prompt = state.request.params, None
        if params.prompt_logprobs is not None and index in self._prompt:
            prompt = self._of_prompt(index, state.num_scored_tokens, params.prompt_logprobs)
        if prompt is not None:
            state.num_scored_tokens += prompt.end - prompt.start
        output = None
        if taken and params.logprobs is not None:
            first = self._first[index]
            output = LogprobRows(self._output, first, first + len(taken), 1 + params.logprobs)
        return RequestUpdate(state.request, taken, state.request.finish_reason, output, prompt)

    def _of_prompt(self, index: int, num_scored_tokens: int, num_top: int) -> LogprobRows | None:
        """Return those of a row's prompt tokens that come after the first `num_scored_tokens` ones; None without any.

        A prefill that is done again after a preemption reports again what was reported already.
        """
        first, count, start = self._prompt[index]
        num_old = num_scored_tokens + 1 - start  # token 0 is not reported
        assert num_old >= 0, "prompt tokens were skipped"
        if num_old >= count:
            return None
        return LogprobRows(self._prompts, first + num_old, first + count, 1 + num_top)


Turn = tuple[bool, int, bool, int]
"""Whether it has no claim to go first, priority, whether it begins here, and arrival. The smallest is served first.

No two requests have the same.
"""

_FEW_STALE_TURNS = 64


class WaitingQueue:
    """Requests without a row, in the order in which they will get one."""

    def __init__(self) -> None:
        self.states: dict[Turn, RequestState] = {}
        """By their turns, in no order."""
        # A heap. Turns of requests that were removed from elsewhere than the front stay, until most turns are such.
        self._turns: list[Turn] = []
        self.num_tokens = 0  # that their prefills will have to compute, if nothing is cached

    def __len__(self) -> int:
        return len(self.states)

    def __contains__(self, state: RequestState) -> bool:
        return turn_of(state) in self.states

    def __iter__(self) -> Iterator[RequestState]:
        return iter([self.states[turn] for turn in sorted(self.states)])

    @property
    def head(self) -> RequestState:
        """The request that is next."""
        while self._turns[0] not in self.states:
            heapq.heappop(self._turns)
        return self.states[self._turns[0]]

    def push(self, state: RequestState) -> None:
        """Take in a request: a new one, or one that was preempted and is served before most others."""
        turn = turn_of(state)
        self.states[turn] = state
        heapq.heappush(self._turns, turn)
        self.num_tokens += state.num_tokens

    def note_growth(self, num_tokens: int) -> None:
        """Count tokens that a waiting request got from steps dispatched before it was preempted."""
        self.num_tokens += num_tokens

    def remove(self, state: RequestState) -> None:
        """Take a request out, wherever it stands."""
        del self.states[turn_of(state)]
        self.num_tokens -= state.num_tokens
        if len(self._turns) > 2 * len(self.states) + _FEW_STALE_TURNS:
            self.states = dict(self.states)  # a copy: a dict that shrinks keeps its memory
            self._turns = list(self.states)
            heapq.heapify(self._turns)

    @staticmethod
    def last_of(states: Iterable[RequestState]) -> RequestState:
        """Return the one that would be served last: whom to preempt."""
        return max(states, key=turn_of)

    def check_integrity(self, running: Iterable[RequestState]) -> None:
        """Assert that nobody overtook anybody of the same priority, and the count of tokens.

        Requests with images may be overtaken while they wait for these.
        """
        first_waiting: dict[tuple[bool, int, bool], int] = {}
        for state in self:
            if state.request.items is None:
                first_waiting.setdefault(turn_of(state)[:3], state.arrival)
        assert set(self.states) <= set(self._turns)
        assert len(self._turns) <= 2 * len(self.states) + _FEW_STALE_TURNS + 1
        for state in running:
            arrival = first_waiting.get(turn_of(state)[:3], state.arrival)
            assert state.arrival <= arrival, "a request was overtaken"
        assert self.num_tokens == sum(state.num_tokens for state in self)


def turn_of(state: RequestState) -> Turn:
    """Return the request's place in the order."""
    request = state.request
    return not request.goes_first, request.priority, not request.num_earlier_tokens, state.arrival

"""What the scheduler knows about an unfinished request: its row, blocks, and steps in flight."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from raypp.messages import NO_STEP, Int32s
from raypp.request import Request

NO_ROW = -1


@dataclass(frozen=True, eq=False, slots=True)
class ItemPin:
    """The items that the first stage keeps for one request while its prompt is computed."""

    keys: tuple[bytes, ...]
    end: int  # one past the last prompt position that reads any of it


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

    blocks: list[int] = field(default_factory=list)  # its block table
    num_sent_blocks: int = 0  # leading entries that the stages were told of
    block_hashes: list[bytes] = field(default_factory=list)  # of leading full blocks, as far as they were needed
    num_offered_blocks: int = 0  # leading blocks that came from the prefix cache or were offered to it
    num_wanted_blocks: int = 0  # free blocks that the last failed attempt to admit it needed; 0 without one

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

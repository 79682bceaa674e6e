"""Log-probabilities of several requests in one message: joined by the driver, split again by the client."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raypp.api.running_request import LogprobLists, logprobs_per_request
from raypp.driver.outbox import Outbox
from raypp.messages import OutputBatch, TokenLogprobs, pack, unpack
from raypp.request import LogprobRows, Request, RequestUpdate
from raypp.types import FinishReason, SamplingParams


def _piece(rng: np.random.Generator, count: int, width: int) -> LogprobRows:
    """Return some rows of a step's, which is a little larger either way."""
    start, more, shape = int(rng.integers(0, 3)), int(rng.integers(0, 3)), (count + 5, width + 2)
    of_step = TokenLogprobs(
        rng.integers(0, 1000, shape, np.int32)[:, : width + more],
        rng.random(shape, np.float32)[:, : width + more],
        rng.integers(1, 9, count + 5, np.int32),
    )
    return LogprobRows(of_step, start, start + count, width)


def _joined(pieces: list[LogprobLists]) -> list[list[object]]:
    return [[value for piece in column for value in piece] for column in zip(*pieces, strict=True)]


def _lists(rows: LogprobRows) -> LogprobLists:
    return LogprobLists(*(column.tolist() for column in rows.own))


class Received:
    """What a client has of one request."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.output: list[LogprobLists] = []
        self.prompt: list[LogprobLists] = []

    def take(self, num_tokens: int, output: LogprobLists | None, prompt: LogprobLists | None) -> None:
        self.num_tokens += num_tokens
        self.output += [] if output is None else [output]
        self.prompt += [] if prompt is None else [prompt]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.lists(st.integers(0, 4), max_size=3)), max_size=6),
    st.integers(0, 2**32),
)
def test_every_request_gets_its_own(requests, seed):
    """Each request has its widths (0: not asked for) and its steps, each with a number of new tokens."""
    rng, batches = np.random.default_rng(seed), []
    outbox = Outbox(lambda _, batch: batches.append(unpack(OutputBatch, pack(batch))), hold_s=3600)
    sent, received = defaultdict(Received), defaultdict(Received)
    for handle, (width, prompt_width, counts) in enumerate(requests):
        request = Request(str(handle), np.ones(1, np.int32), SamplingParams(), 0, handle=handle)
        request.output_token_ids = [0] * 99  # so that nothing is a first token
        for count in counts:
            output = _piece(rng, count, width) if width and count else None
            prompt = _piece(rng, 2, prompt_width) if prompt_width else None
            outbox.put([RequestUpdate(request, list(range(count)), FinishReason.NONE, output, prompt)])
            sent[handle].take(count, *(None if rows is None else _lists(rows) for rows in (output, prompt)))
    last = Request("last", np.ones(1, np.int32), SamplingParams(), 0, handle=-1, finish_reason=FinishReason.LENGTH)
    last.output_token_ids = [0] * 99
    outbox.put([RequestUpdate(last, [5], FinishReason.LENGTH)])  # takes along what is held
    for batch in batches:
        columns = (batch.handles.tolist(), batch.num_tokens.tolist(), logprobs_per_request(batch))
        for handle, num_tokens, (output, prompt) in zip(*columns, strict=True):
            received[handle].take(num_tokens, output, prompt)
    for handle, of_request in sent.items():
        assert received[handle].num_tokens == of_request.num_tokens
        assert _joined(received[handle].output) == _joined(of_request.output)
        assert _joined(received[handle].prompt) == _joined(of_request.prompt)

"""Log-probabilities of several requests in one message: joined by the driver, split again by the client."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raypp.api.output_logprobs import logprobs_per_request
from raypp.driver.outbox import Outbox
from raypp.messages import OutputBatch, TokenLogprobs, pack, unpack
from raypp.scheduler.request import Request, RequestUpdate
from raypp.types import FinishReason, SamplingParams


def _piece(rng: np.random.Generator, count: int, width: int) -> TokenLogprobs:
    shape = (count, width)
    return TokenLogprobs(
        rng.integers(0, 1000, shape, np.int32),
        rng.random(shape, np.float32),
        rng.integers(1, 9, count, np.int32),
    )


def _joined(pieces: list[TokenLogprobs]) -> list[list[object]]:
    columns = zip(*((p.token_ids, p.logprobs, p.ranks) for p in pieces), strict=True)
    return [np.concatenate(column).tolist() for column in columns]


class Received:
    """What a client has of one request."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.output: list[TokenLogprobs] = []
        self.prompt: list[TokenLogprobs] = []

    def take(self, num_tokens: int, output: TokenLogprobs | None, prompt: TokenLogprobs | None) -> None:
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
            outbox.put([RequestUpdate(request, list(range(count)), output, prompt)])
            sent[handle].take(count, output, prompt)
    last = Request("last", np.ones(1, np.int32), SamplingParams(), 0, handle=-1, finish_reason=FinishReason.LENGTH)
    last.output_token_ids = [0] * 99
    outbox.put([RequestUpdate(last, [5])])  # takes along what is held
    for batch in batches:
        columns = (batch.handles.tolist(), batch.num_tokens.tolist(), logprobs_per_request(batch))
        for handle, num_tokens, (output, prompt) in zip(*columns, strict=True):
            received[handle].take(num_tokens, output, prompt)
    for handle, of_request in sent.items():
        assert received[handle].num_tokens == of_request.num_tokens
        assert _joined(received[handle].output) == _joined(of_request.output)
        assert _joined(received[handle].prompt) == _joined(of_request.prompt)

"""What a client keeps of a running request, so that it can hand it to another engine: little more than its tokens."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest

from raypp.api.poison_requests import PoisonDetector
from raypp.api.running_request import PreparedRequest, RunningRequest, messages_of_begun
from raypp.api.tokenizer import Tokenizer
from raypp.client_messages import encode_client_message
from raypp.models.registry import resolve_model_path
from raypp.request import Request
from raypp.types import SamplingParams

NUM_REQUESTS = 8
NUM_TOKENS = 400
FEW_TOKENS = 50
MAX_BYTES_PER_TOKEN = 100


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(str(resolve_model_path("tiny")), max_tokens=1 << 20)


@pytest.mark.in_ci("False-stop0", "True-stop1")
@pytest.mark.parametrize("stop", [(), ("never said",)])
@pytest.mark.parametrize("streams", [False, True])
def test_a_token_takes_at_most_100_bytes(tokenizer: Tokenizer, streams: bool, stop: tuple[str, ...]) -> None:
    texts = np.random.default_rng(0).integers(260, 500, (NUM_TOKENS, NUM_REQUESTS))
    params, detector = SamplingParams(max_tokens=NUM_TOKENS + 1, stop=list(stop)), PoisonDetector()
    prompt = np.arange(8, dtype=np.int32)

    def begin() -> list[RunningRequest]:
        return [
            RunningRequest(
                PreparedRequest(Request(f"r{handle}", prompt, params, seed=0)),
                [handle],
                tokenizer,
                stream=streams,
                on_change=lambda _: None,
            )
            for handle in range(NUM_REQUESTS)
        ]

    def run(requests: list[RunningRequest], num_steps: int) -> None:
        for of_step in texts[:num_steps].tolist():  # as they come out of a message
            for request, token_id in zip(requests, of_step, strict=True):
                request.completions[0].update([token_id], 0, -1, None)

    def die_and_go_on(requests: list[RunningRequest]) -> None:
        unfinished = {request.request_id: request.num_tokens for request in requests}
        detector.note_loss(0)
        detector.note_death(unfinished, unfinished, max_running=NUM_REQUESTS)
        detector.begin(unfinished)
        for message in messages_of_begun(((request, request.completions[0]) for request in requests), NUM_REQUESTS):
            encode_client_message(message)

    def kept_bytes(num_tokens: int) -> int:
        tracemalloc.start()
        try:
            requests = begin()
            run(requests, num_tokens)
            die_and_go_on(requests)
            gc.collect()
            assert all(len(request.completions[0].token_ids) == num_tokens for request in requests)
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()

    kept_bytes(NUM_TOKENS)  # caches of the tokenizer are not the requests'
    more_bytes = kept_bytes(NUM_TOKENS) - kept_bytes(FEW_TOKENS)
    per_token = more_bytes / NUM_REQUESTS / (NUM_TOKENS - FEW_TOKENS)
    print(f"{per_token:.1f} bytes per token, with the tokens and their text")
    assert 8 < per_token <= MAX_BYTES_PER_TOKEN

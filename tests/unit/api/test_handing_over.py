"""Which requests are handed to another engine in one message, and what of them is asked for again."""

from __future__ import annotations

import numpy as np
import pytest

from raypp.api.running_request import LogprobLists, PreparedRequest, RunningRequest, messages_of_begun
from raypp.prompt_items import EncoderItem, PromptItems
from raypp.request import Request
from raypp.types import SamplingParams


def handed_over(has_image: list[bool], max_running: int) -> list[int]:
    """Return the requests per message."""
    item = EncoderItem.of(np.zeros((4, 12), np.uint8), (1, 2, 2), num_tokens=1)
    prompt, params = np.ones(4, np.int32), SamplingParams()
    requests = []
    for handle, has in enumerate(has_image):
        items = PromptItems((item,), (1,), merge_size=2) if has else None
        prepared = PreparedRequest(Request(f"r{handle}", prompt, params, seed=0, items=items))
        requests.append(RunningRequest(prepared, [handle], None, stream=False, on_change=lambda _: None))
    messages = list(messages_of_begun(((r, r.completions[0]) for r in requests), max_running))
    handles = [request.handle for message in messages for request in message.requests]
    assert handles == list(range(len(has_image))), "in order, each once"
    return [len(message.requests) for message in messages]


def test_those_that_go_first_keep_their_priority() -> None:
    prepared = PreparedRequest(Request("r", np.ones(4, np.int32), SamplingParams(), seed=0, priority=-(2**31)))
    running = RunningRequest(prepared, [0], None, stream=False, on_change=lambda _: None)
    for goes_first in (False, True):
        [message] = messages_of_begun([(running, running.completions[0])], 8, goes_first=goes_first)
        assert [(request.goes_first, request.priority) for request in message.requests] == [(goes_first, -(2**31))]


def test_what_can_run_at_once_is_one_message() -> None:
    assert handed_over([False] * 70, max_running=40) == [40, 16, 14]


def test_pixels_do_not_wait_for_those_of_all_others() -> None:
    assert handed_over([True] * 40, max_running=40) == [16, 16, 8]
    assert handed_over([False] * 30 + [True] * 10, max_running=40) == [30, 10]


@pytest.mark.parametrize("num_known", [0, 2, 3])
def test_prompt_logprobs_are_asked_for_again_if_some_are_missing(num_known: int) -> None:
    prepared = PreparedRequest(Request("r", np.ones(4, np.int32), SamplingParams(prompt_logprobs=0), seed=0))
    request = RunningRequest(prepared, [0], None, stream=False, on_change=lambda _: None)
    request.add_prompt_logprobs(LogprobLists([[5]] * num_known, [[-1.0]] * num_known, [1] * num_known))
    [message] = messages_of_begun([(request, request.completions[0])], 8)
    [handed_over] = message.requests
    assert handed_over.params.prompt_logprobs == (None if num_known == 3 else 0)

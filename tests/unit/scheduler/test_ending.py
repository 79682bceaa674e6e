import pytest
from drive import make_request

from raypp.scheduler.request_state import RequestState, end_token_ids
from raypp.scheduler.scheduler import take_tokens
from raypp.types import FinishReason

EOS = frozenset({50, 51})


def _state(limit: int = 100, **params) -> RequestState:
    request = make_request(prompt=4, eos=EOS, **params)
    return RequestState(request, 0, limit, end_token_ids(request), 4)


@pytest.mark.parametrize(
    ("params", "token_ids", "taken", "reason", "stop_token_id"),
    [
        ({}, [1, 2], [1, 2], FinishReason.NONE, -1),
        ({}, [1, 51, 2], [1, 51], FinishReason.STOP, -1),
        ({"ignore_eos": True}, [1, 51, 2], [1, 51, 2], FinishReason.NONE, -1),
        ({"stop_token_ids": [9]}, [1, 9, 2], [1, 9], FinishReason.STOP, 9),
        ({"stop_token_ids": [9]}, [50, 9], [50], FinishReason.STOP, -1),
        ({"stop_token_ids": [50]}, [50, 9], [50], FinishReason.STOP, -1),
        ({"stop_token_ids": [50], "ignore_eos": True}, [50, 9], [50], FinishReason.STOP, 50),
    ],
)
def test_the_ending_token_is_kept_and_what_follows_is_dropped(params, token_ids, taken, reason, stop_token_id):
    state = _state(**params)
    assert take_tokens(state, token_ids) == taken
    assert state.request.output_token_ids == taken
    assert state.num_tokens == 4 + len(taken)
    assert (state.request.finish_reason, state.request.stop_token_id) == (reason, stop_token_id)


def test_length_ends_a_request_and_a_stop_at_the_limit_is_a_stop():
    state = _state(limit=6)
    assert take_tokens(state, [1]) == [1]
    assert state.request.finish_reason == FinishReason.NONE
    assert take_tokens(state, [2, 3]) == [2]
    assert state.request.finish_reason == FinishReason.LENGTH
    state = _state(limit=5)
    take_tokens(state, [50])
    assert state.request.finish_reason == FinishReason.STOP

"""What goes over the wire comes out as it went in."""

from __future__ import annotations

import numpy as np
import pytest

from raypp import errors
from raypp.client_messages import (
    AbortRequests,
    AddRequest,
    AddRequests,
    CloseClient,
    EngineDead,
    OpenClient,
    Rejected,
    StatsCall,
    StatsReply,
    decode_client_message,
    decode_driver_message,
    encode_client_message,
    encode_driver_message,
)
from raypp.messages import OutputBatch
from raypp.types import SamplingParams

PARAMS = SamplingParams(max_tokens=7, temperature=0.3, stop=["a", "\ud800"], stop_token_ids=[1, 2], seed=-(2**63))
REQUESTS = [
    AddRequest("r0", 0, [1, 2, 3], PARAMS, 2**63 - 1, (2,)),
    AddRequest("Grüße", 2**62, [2**31 - 1], SamplingParams(ignore_eos=True), -5, ()),
    AddRequest(
        "c\0001",
        3,
        [7],
        SamplingParams(n=2, logit_bias={5: -1.5, 0: 2}, allowed_token_ids=[1, 2], bad_words=["a b"], logprobs=0),
        0,
        (1,),
        bad_word_token_ids=((1, 2), (3,)),
        priority=-4,
        is_streamed=False,
    ),
]


@pytest.mark.parametrize(
    "message",
    [OpenClient(), AddRequests(REQUESTS), AddRequests([]), AbortRequests(["a", "b"]), StatsCall(3), CloseClient()],
)
def test_client_messages_round_trip(message: object) -> None:
    assert decode_client_message(encode_client_message(message)) == message  # type: ignore[arg-type]


def test_outputs_round_trip() -> None:
    columns = {name: np.arange(3, dtype=np.int32) for name in OutputBatch.__dataclass_fields__}
    columns["handles"] = np.array([1, 2, 2**62], np.int64)
    columns["logprobs"] = np.arange(5, dtype=np.uint8)
    decoded = decode_driver_message(encode_driver_message(OutputBatch(**columns)))
    for name, column in columns.items():
        np.testing.assert_array_equal(getattr(decoded, name), column)


def test_replies_round_trip() -> None:
    reply = StatsReply(9, {"num_running": 3, "nested": {"a": [1.5, None]}})
    assert decode_driver_message(encode_driver_message(reply)) == reply


@pytest.mark.parametrize(
    "error",
    [
        errors.RequestError("bad", request_id="r1", got=3, expected="less", hint="lower it"),
        errors.StageDiedError("gone", stage_index=2),
        errors.ResourceError("full", got=[1, 2]),
        errors.EngineDeadError("dead"),
    ],
)
def test_errors_come_out_as_the_class_that_went_in(error: errors.RayppError) -> None:
    rejected = decode_driver_message(encode_driver_message(Rejected(5, error)))
    dead = decode_driver_message(encode_driver_message(EngineDead(error)))
    assert isinstance(rejected, Rejected)
    assert isinstance(dead, EngineDead)
    assert rejected.handle == 5
    for found in (rejected.error, dead.error):
        assert type(found) is type(error)
        assert str(found) == str(error)
        assert getattr(found, "request_id", None) == getattr(error, "request_id", None)
        assert getattr(found, "stage_index", None) == getattr(error, "stage_index", None)

"""What goes over the wire comes out as it went in."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from raypp import errors
from raypp.client_messages import (
    AbortRequests,
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
from raypp.prompt_items import EncoderItem, PromptItems
from raypp.request import Request
from raypp.types import SamplingParams

PARAMS = SamplingParams(max_tokens=7, temperature=0.3, stop=["a", "\ud800"], stop_token_ids=[1, 2], seed=-(2**63))
REQUESTS = [
    Request("r0", np.array([1, 2, 3], np.int32), PARAMS, 2**63 - 1, frozenset({2}), handle=0, is_streamed=True),
    Request(
        "Grüße", np.array([2**31 - 1], np.int32), SamplingParams(ignore_eos=True), -5, handle=2**62, is_streamed=True
    ),
    Request(
        "c\0001",
        np.array([7], np.int32),
        SamplingParams(n=2, logit_bias={5: -1.5, 0: 2}, allowed_token_ids=[1, 2], bad_words=["a b"], logprobs=0),
        0,
        frozenset({1}),
        handle=3,
        bad_word_token_ids=((1, 2), (3,)),
        priority=-4,
        goes_first=True,
        cache_salt="salz \ud800",
    ),
    Request(
        "begun",
        np.array([8, 9], np.int32),
        PARAMS,
        0,
        handle=4,
        output_token_ids=[5, 6, 7],
        is_streamed=True,
    ),
]


@pytest.mark.parametrize(
    "message",
    [OpenClient(), AbortRequests(["a", "b"]), StatsCall(3), CloseClient()],
)
def test_client_messages_round_trip(message: object) -> None:
    assert decode_client_message(encode_client_message(message)) == message  # type: ignore[arg-type]


def _plain(request: Request) -> dict[str, Any]:
    return asdict(request) | {
        "prompt_token_ids": request.prompt_token_ids.tolist(),
    }


def _sent(requests: list[Request]) -> list[Request]:
    received = decode_client_message(encode_client_message(AddRequests(requests)))
    assert isinstance(received, AddRequests)
    return list(received.requests)


@pytest.mark.parametrize("requests", [REQUESTS, REQUESTS[:1], []])
def test_requests_round_trip(requests: list[Request]) -> None:
    received = _sent(requests)
    assert {r.prompt_token_ids.dtype for r in received} <= {np.dtype(np.int32)}
    assert [_plain(r) for r in received] == [_plain(r) for r in requests]


def test_continuations_share_their_prompt_and_parameters_and_no_request_keeps_the_message() -> None:
    prompt = np.arange(1000, dtype=np.int32)
    copies = [Request(f"n{i}", prompt, PARAMS, i, frozenset({2}), handle=i, is_streamed=True) for i in range(64)]
    frames = encode_client_message(AddRequests([*copies, REQUESTS[0]]))
    assert len(frames[2]) == 4 * 1003
    *received, last = _sent([*copies, REQUESTS[0]])
    assert len({id(r.prompt_token_ids) for r in received}) == len({id(r.params) for r in received}) == 1
    assert last.prompt_token_ids.tolist() == [1, 2, 3]
    assert last.prompt_token_ids.base is None


def test_continuations_that_go_on_share_their_prompt_and_have_their_own_tokens() -> None:
    prompt = np.arange(1000, dtype=np.int32)
    begun = [list(range(5000, 5000 + count)) for count in (3, 0, 7, 1)]
    copies = [
        Request(f"n{i}", prompt, PARAMS, i, frozenset({2}), handle=i, output_token_ids=token_ids, is_streamed=True)
        for i, token_ids in enumerate(begun)
    ]
    frames = encode_client_message(AddRequests([*copies, *REQUESTS]))
    assert len(frames[2]) == 4 * (1000 + 11) + 4 * (3 + 1 + 1 + 2 + 3)
    received = _sent([*copies, *REQUESTS])
    assert [_plain(r) for r in received] == [_plain(r) for r in [*copies, *REQUESTS]]
    assert len({id(r.prompt_token_ids) for r in received[:4]}) == 1


def test_pictures_round_trip_and_a_repeated_one_travels_once() -> None:
    rng = np.random.default_rng(0)
    first, second = (
        EncoderItem.of(rng.integers(0, 256, (4 * n, 12), np.uint8), (1, 2, 2 * n), num_tokens=n) for n in (1, 3)
    )
    items = PromptItems((first, second, first), (1, 3, 6), merge_size=2)
    sent = AddRequests(
        [*REQUESTS, Request("v", np.ones(8, np.int32), PARAMS, 0, handle=9, items=items, is_streamed=True), REQUESTS[0]]
    )
    frames = encode_client_message(sent)
    assert sum(map(len, frames[3:])) == first.patches.nbytes + second.patches.nbytes
    received = decode_client_message(frames)
    assert isinstance(received, AddRequests)
    requests = list(received.requests)
    assert [r.request_id for r in requests] == [r.request_id for r in sent.requests]
    again = requests[-2].items
    assert again is not None
    assert (again.starts, again.merge_size) == (items.starts, items.merge_size)
    np.testing.assert_array_equal(again.rope_positions(8), items.rope_positions(8))
    for got, given in zip(again.items, items.items, strict=True):
        assert (got.key, got.grid_thw, got.num_tokens) == (given.key, given.grid_thw, given.num_tokens)
        np.testing.assert_array_equal(got.patches, given.patches)
    assert requests[-1].items is None


def test_an_item_is_named_by_its_content() -> None:
    patches = np.arange(48, dtype=np.uint8).reshape(4, 12)
    item = EncoderItem.of(patches, (1, 2, 2), 1)
    assert item.key == EncoderItem.of(patches.copy(), (1, 2, 2), 1).key
    assert item.key != EncoderItem.of(patches, (1, 4, 1), 1).key
    assert item.key != EncoderItem.of(patches + np.uint8(1), (1, 2, 2), 1).key


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
        errors.StageDiedError("gone", stage_index=2, silent_s=1.5),
        errors.ResourceError("full", got=[1, 2]),
        errors.EngineDeadError("dead"),
    ],
)
def test_errors_come_out_as_the_class_that_went_in(error: errors.RayppError) -> None:
    rejected = decode_driver_message(encode_driver_message(Rejected(5, error)))
    dead = decode_driver_message(encode_driver_message(EngineDead(error, [3, 2**62])))
    assert isinstance(rejected, Rejected)
    assert isinstance(dead, EngineDead)
    assert rejected.handle == 5
    assert dead.in_flight == [3, 2**62]
    for found in (rejected.error, dead.error):
        assert type(found) is type(error)
        assert str(found) == str(error)
        assert getattr(found, "request_id", None) == getattr(error, "request_id", None)
        assert getattr(found, "stage_index", None) == getattr(error, "stage_index", None)

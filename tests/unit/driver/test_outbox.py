"""Clients are told what matters at once, and of the rest when something matters or enough time has passed."""

from __future__ import annotations

import numpy as np

from raypp.driver.outbox import Outbox
from raypp.request import Request, RequestUpdate
from raypp.types import FinishReason, SamplingParams


def _request(name: str, *, client: bytes = b"c", is_streamed: bool = False) -> Request:
    return Request(
        name, np.ones(1, np.int32), SamplingParams(), 0, client=client, handle=ord(name), is_streamed=is_streamed
    )


def _update(request: Request, *token_ids: int, reason: FinishReason = FinishReason.NONE) -> RequestUpdate:
    request.output_token_ids.extend(token_ids)
    request.finish_reason = reason
    return RequestUpdate(request, list(token_ids), reason)


class Sent:
    """Gathers what an outbox sends."""

    def __init__(self) -> None:
        self.messages: list[tuple[bytes, dict[int, list[int]]]] = []
        self.reasons: list[list[int]] = []

    def __call__(self, client, batch) -> None:
        ends = batch.num_tokens.cumsum().tolist()
        token_ids = batch.token_ids.tolist()
        tokens = {
            handle: token_ids[end - count : end]
            for handle, count, end in zip(batch.handles.tolist(), batch.num_tokens.tolist(), ends, strict=True)
        }
        self.messages.append((client, tokens))
        self.reasons.append(batch.finish_reasons.tolist())


def test_first_tokens_go_at_once_and_the_rest_with_the_end():
    sent = Sent()
    outbox, request = Outbox(sent, hold_s=3600), _request("a")
    outbox.put([_update(request, 5)])
    outbox.put([_update(request, 6)])
    outbox.put([_update(request, 7)])
    assert sent.messages == [(b"c", {97: [5]})]
    outbox.put([_update(request, 8, reason=FinishReason.LENGTH)])
    assert sent.messages[1:] == [(b"c", {97: [6, 7, 8]})]
    assert sent.reasons == [[FinishReason.NONE], [FinishReason.LENGTH]]


def test_first_tokens_of_two_steps_that_come_together_go_at_once():
    sent = Sent()
    outbox, request = Outbox(sent, hold_s=3600), _request("a")
    outbox.put([_update(_request("b"), 1)])
    outbox.put([_update(request, 5), _update(request, 6)])
    assert sent.messages[1:] == [(b"c", {97: [5, 6]})]


def test_what_is_sent_is_as_it_was_when_it_was_put_in():
    sent = Sent()
    outbox, request = Outbox(sent, hold_s=3600), _request("a")
    outbox.put([_update(request, 5)])
    outbox.put([_update(request, 6)])
    _update(request, 7, reason=FinishReason.LENGTH)  # which never comes here
    outbox.flush()
    assert sent.messages[1:] == [(b"c", {97: [6]})]
    assert sent.reasons[1:] == [[FinishReason.NONE]], "the text would look whole without its last token"


def test_what_is_streamed_takes_along_what_is_held():
    sent = Sent()
    outbox, quiet, streamed = Outbox(sent, hold_s=3600), _request("a"), _request("b", is_streamed=True)
    outbox.put([_update(quiet, 1), _update(streamed, 2)])
    outbox.put([_update(quiet, 3)])
    outbox.put([_update(streamed, 4)])
    assert sent.messages == [(b"c", {97: [1], 98: [2]}), (b"c", {97: [3], 98: [4]})]


def test_nothing_is_held_for_longer_than_asked():
    sent = Sent()
    outbox, request = Outbox(sent, hold_s=0.0), _request("a")
    for token_id in range(5):
        outbox.put([_update(request, token_id)])
    assert [tokens for _, tokens in sent.messages] == [{97: [t]} for t in range(5)]


def test_clients_do_not_see_each_other():
    sent = Sent()
    outbox = Outbox(sent, hold_s=3600)
    outbox.put([_update(_request("a", client=b"x"), 1), _update(_request("a", client=b"y"), 2)])
    assert sorted(sent.messages) == [(b"x", {97: [1]}), (b"y", {97: [2]})]


def test_a_client_that_left_is_told_nothing():
    sent = Sent()
    outbox, request = Outbox(sent, hold_s=3600), _request("a")
    outbox.put([_update(request, 1)])
    outbox.put([_update(request, 2)])
    outbox.forget(b"c")
    outbox.put([_update(request, reason=FinishReason.ABORT)])
    assert sent.messages[1:] == [(b"c", {97: []})]

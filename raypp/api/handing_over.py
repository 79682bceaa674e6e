"""Requests on their way to an engine: new ones, and those that another engine has begun and could not end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from raypp.api.running_completion import RunningCompletion
from raypp.api.running_request import RunningRequest
from raypp.client_messages import AddRequests
from raypp.request import Request

_REQUESTS_PER_MESSAGE = 16
"""The driver reads a message's header at once, between two steps. The continuations of one prompt stay together."""


def messages_of_new(requests: Iterable[RunningRequest]) -> Iterator[AddRequests]:
    """Yield what hands new requests to the engine, in order."""
    return _messages([_to_add(r, c, [], lacks_prompt_logprobs=True) for c in r.completions] for r in requests)


def messages_of_begun(
    completions: Iterable[tuple[RunningRequest, RunningCompletion]],
    max_running: int,
    *,
    goes_first: bool = False,
) -> Iterator[AddRequests]:
    """Yield what hands unfinished continuations to another engine, in order.

    The first message has all that can run at once: an engine that computes nothing takes a message in as a whole, so
    its first steps are the same each time the same requests are handed over. Requests with images wait for encoders
    anyway, and their pixels are large: they come in messages of a few.

    Args:
        completions: Each with its request.
        max_running: The engine's rows.
        goes_first: Whether they are served before all others, whatever their priority.
    """
    for message in _messages(
        ([_to_add(r, c, r.begin_anew(c), lacks_prompt_logprobs=r.lacks_prompt_logprobs)] for r, c in completions),
        most_in_first=max(max_running, _REQUESTS_PER_MESSAGE),
    ):
        for request in message.requests:
            request.goes_first = goes_first
        yield message


def _messages(groups: Iterable[Sequence[Request]], most_in_first: int = _REQUESTS_PER_MESSAGE) -> Iterator[AddRequests]:
    together: list[Request] = []
    most = most_in_first
    for group in groups:
        if any(request.items is not None for request in group):
            most = _REQUESTS_PER_MESSAGE
        if together and len(together) + len(group) > most:
            yield AddRequests(together)
            together, most = [], _REQUESTS_PER_MESSAGE
        together += group
    if together:
        yield AddRequests(together)


def _to_add(
    request: RunningRequest, completion: RunningCompletion, output_token_ids: list[int], *, lacks_prompt_logprobs: bool
) -> Request:
    """Return what the engine is told of a continuation: to it, each is a request of its own."""
    prepared, params = request.prepared, request.params
    if params.prompt_logprobs is not None and (completion.index > 0 or not lacks_prompt_logprobs):
        params = replace(params, prompt_logprobs=None)  # the first one brings them, once
    return replace(
        prepared.request,
        request_id=completion.engine_id,
        params=params,
        seed=prepared.seed_of(completion.index),
        handle=completion.handle,
        is_streamed=request.is_streamed or bool(params.stop),
        output_token_ids=output_token_ids,
    )

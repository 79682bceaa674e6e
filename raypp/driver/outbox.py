"""Gathers the outputs of clients, and sends them when it matters: waking a client costs as much as a plan.

A client hears at once of a request's first tokens, of its end, and of every token that it streams or searches for stop
strings; and then of everything else that has come. Tokens that no client waits for are held for a moment.

Tokens and the reason of an end are those of the updates. Counters are read from the request when they are sent: they
only grow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raypp.messages import NO_BYTES, Bytes, OutputBatch, OutputLogprobs, TokenLogprobs, int32s, pack_inside
from raypp.request import LogprobRows, Request, RequestUpdate
from raypp.types import FinishReason

HOLD_S = 0.05
"""How old held tokens get while steps end."""


@dataclass(slots=True)
class _Held:
    """What one request is still to be told."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.NONE
    logprobs: list[LogprobRows] = field(default_factory=list)
    prompt_logprobs: list[LogprobRows] = field(default_factory=list)

    def take(self, update: RequestUpdate) -> None:
        self.token_ids += update.new_token_ids
        self.finish_reason = update.finish_reason
        if update.logprobs is not None:
            self.logprobs.append(update.logprobs)
        if update.prompt_logprobs is not None:
            self.prompt_logprobs.append(update.prompt_logprobs)


class Outbox:
    """Gathers updates, and sends them per client."""

    def __init__(self, send: Callable[[bytes, OutputBatch], None], hold_s: float = HOLD_S) -> None:
        """Gather nothing yet.

        Args:
            send: Takes a client and its message.
            hold_s: How long tokens that no client waits for may be held, seconds.
        """
        self._send = send
        self._hold_s = hold_s
        self._held: dict[bytes, dict[Request, _Held]] = {}
        self._last_sent_s: dict[bytes, float] = {}

    def put(self, updates: Iterable[RequestUpdate]) -> None:
        """Take in what a step brought, and send what is due."""
        due: set[bytes] = set()
        now_s = time.monotonic()
        for update in updates:
            request = update.request
            held = self._held.setdefault(request.client, {}).setdefault(request, _Held())
            held.take(update)
            if (
                request.is_streamed
                or update.finish_reason
                or (update.new_token_ids and request.num_new_tokens == len(held.token_ids))  # all that it has had
                or now_s - self._last_sent_s.get(request.client, 0.0) > self._hold_s
            ):
                due.add(request.client)
        for client in due:
            self._last_sent_s[client] = now_s
            self._send_held(client)

    def flush(self) -> None:
        """Send everything that is held."""
        for client in list(self._held):
            self._send_held(client)

    def forget(self, client: bytes) -> None:
        """Drop what a client that left would still have been told."""
        self._held.pop(client, None)
        self._last_sent_s.pop(client, None)

    def _send_held(self, client: bytes) -> None:
        self._send(client, _output_batch(self._held.pop(client)))


def _output_batch(held: dict[Request, _Held]) -> OutputBatch:
    requests, contents = list(held), list(held.values())
    drafts = [request.draft_counts for request in requests]
    return OutputBatch(
        handles=np.array([request.handle for request in requests], np.int64),
        num_tokens=int32s([len(content.token_ids) for content in contents]),
        token_ids=int32s([token_id for content in contents for token_id in content.token_ids]),
        finish_reasons=int32s([content.finish_reason for content in contents]),
        stop_token_ids=int32s([request.stop_token_id for request in requests]),
        num_cached_tokens=int32s([request.num_cached_tokens for request in requests]),
        num_preemptions=int32s([request.num_preemptions for request in requests]),
        queue_us=int32s([request.queue_us for request in requests]),
        drafted_by_position=_table([counts.drafted_by_position if counts else None for counts in drafts]),
        accepted_by_position=_table([counts.accepted_by_position if counts else None for counts in drafts]),
        logprobs=pack_logprobs([c.logprobs for c in contents], [c.prompt_logprobs for c in contents]),
    )


def _table(rows: Sequence[list[int] | None]) -> NDArray[np.int32]:
    """Return rows of equal length as one array; None is a row of zeros."""
    width = max((len(row) for row in rows if row is not None), default=1)
    table = np.zeros((len(rows), width), np.int32)
    for index, row in enumerate(rows):
        if row is not None:
            table[index] = row
    return table


_NOTHING = TokenLogprobs(np.empty((0, 1), np.int32), np.empty((0, 1), np.float32), np.empty(0, np.int32))


def pack_logprobs(output: Sequence[Sequence[LogprobRows]], prompt: Sequence[Sequence[LogprobRows]]) -> Bytes:
    """Return a packed `OutputLogprobs`; nothing when no request has any.

    Args:
        output: Per request, of its new tokens: what several steps brought, in order.
        prompt: Per request, of its next prompt tokens, likewise.
    """
    if not any(output) and not any(prompt):
        return NO_BYTES
    columns = _joined(output)._asdict()
    prompt_columns = {f"prompt_{name}": column for name, column in _joined(prompt)._asdict().items()}
    return pack_inside(
        OutputLogprobs(
            counts=int32s([sum(rows.end - rows.start for rows in of_request) for of_request in output]),
            widths=int32s([of_request[0].width if of_request else 0 for of_request in output]),
            prompt_counts=int32s([sum(rows.end - rows.start for rows in of_request) for of_request in prompt]),
            prompt_widths=int32s([of_request[0].width if of_request else 0 for of_request in prompt]),
            **columns,
            **prompt_columns,
        )
    )


def _joined(requests: Sequence[Sequence[LogprobRows]]) -> TokenLogprobs:
    """Return the rows of all requests, one after the other: of all steps' columns, a few are taken at once."""
    steps: dict[int, TokenLogprobs] = {}
    firsts: dict[int, int] = {}
    indices: list[int] = []
    num_rows = 0
    for of_request in requests:
        for of_step, start, end, _ in of_request:
            key = id(of_step)
            if key not in firsts:
                steps[key], firsts[key] = of_step, num_rows
                num_rows += len(of_step.ranks)
            first = firsts[key]
            indices.extend(range(first + start, first + end))
    if not steps:
        return _NOTHING
    width = max(of_step.token_ids.shape[1] for of_step in steps.values())
    return TokenLogprobs(*(_stacked(column, width)[indices] for column in zip(*steps.values(), strict=True)))


def _stacked(columns: Sequence[NDArray[Any]], width: int) -> NDArray[Any]:
    """Return columns of several steps below each other; steps with fewer of the most likely tokens are filled up."""
    if len(columns) == 1:
        return columns[0]
    return np.concatenate(
        [column if column.ndim == 1 else np.pad(column, ((0, 0), (0, width - column.shape[1]))) for column in columns]
    )

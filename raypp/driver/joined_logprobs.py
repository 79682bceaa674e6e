"""Joins the log-probabilities of several requests into one message, for `raypp.api.output_logprobs` to split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raypp.messages import NO_BYTES, Bytes, Int32s, OutputLogprobs, TokenLogprobs, pack_inside
from raypp.request import LogprobRows

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
            counts=_int32s([sum(rows.end - rows.start for rows in of_request) for of_request in output]),
            widths=_int32s([of_request[0].width if of_request else 0 for of_request in output]),
            prompt_counts=_int32s([sum(rows.end - rows.start for rows in of_request) for of_request in prompt]),
            prompt_widths=_int32s([of_request[0].width if of_request else 0 for of_request in prompt]),
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
        [column if column.ndim == 1 or column.shape[1] == width else _widened(column, width) for column in columns]
    )


def _widened(column: NDArray[Any], width: int) -> NDArray[Any]:
    return np.pad(column, ((0, 0), (0, width - column.shape[1])))


def _int32s(values: Sequence[int]) -> Int32s:
    return np.array(values, np.int32)

"""Joining the log-probabilities of several requests into one message. `raypp.api.output_logprobs` splits them again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raypp.messages import NO_BYTES, Bytes, Float32s, Int32s, OutputLogprobs, TokenLogprobs, pack_inside

Pieces = Sequence[TokenLogprobs]
"""What several steps brought to one request, in order, all of one width."""


def pack_logprobs(output: Sequence[Pieces], prompt: Sequence[Pieces]) -> Bytes:
    """Return a packed `OutputLogprobs`; nothing when no request has any.

    Args:
        output: Per request, of its new tokens.
        prompt: Per request, of its next prompt tokens.
    """
    if not any(output) and not any(prompt):
        return NO_BYTES
    token_ids, logprobs, ranks = _joined(output)
    prompt_token_ids, prompt_logprobs, prompt_ranks = _joined(prompt)
    return pack_inside(
        OutputLogprobs(
            widths=_widths(output),
            token_ids=token_ids,
            logprobs=logprobs,
            ranks=ranks,
            prompt_widths=_widths(prompt),
            prompt_counts=np.array([sum(len(piece.ranks) for piece in pieces) for pieces in prompt], np.int32),
            prompt_token_ids=prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            prompt_ranks=prompt_ranks,
        )
    )


def _widths(requests: Sequence[Pieces]) -> Int32s:
    return np.array([pieces[0].token_ids.shape[1] if pieces else 0 for pieces in requests], np.int32)


def _joined(requests: Sequence[Pieces]) -> tuple[Int32s, Float32s, Int32s]:
    flat = [piece for pieces in requests for piece in pieces]
    if not flat:
        return np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32)
    return (
        np.concatenate([piece.token_ids.reshape(-1) for piece in flat]),
        np.concatenate([piece.logprobs.reshape(-1) for piece in flat]),
        np.concatenate([piece.ranks for piece in flat]),
    )

"""Splitting the log-probabilities of an output message into those of its requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat

from raypp.messages import Float32s, Int32s, OutputBatch, OutputLogprobs, TokenLogprobs, unpack

OfRequest = tuple[TokenLogprobs | None, TokenLogprobs | None]
"""Of its new tokens, and of its next prompt tokens."""

_NOTHING: OfRequest = (None, None)


def logprobs_per_request(batch: OutputBatch) -> Iterator[OfRequest]:
    """Yield what the message holds for each of its requests, in order."""
    if not len(batch.logprobs):
        return repeat(_NOTHING, len(batch.handles))
    message = unpack(OutputLogprobs, batch.logprobs.data)
    return zip(
        _split(batch.num_tokens.tolist(), message.widths, message.token_ids, message.logprobs, message.ranks),
        _split(
            message.prompt_counts.tolist(),
            message.prompt_widths,
            message.prompt_token_ids,
            message.prompt_logprobs,
            message.prompt_ranks,
        ),
        strict=True,
    )


def _split(
    counts: Sequence[int], widths: Int32s, token_ids: Int32s, logprobs: Float32s, ranks: Int32s
) -> Iterator[TokenLogprobs | None]:
    start = first_rank = 0
    for count, width in zip(counts, widths.tolist(), strict=True):
        if not count or not width:
            yield None
            continue
        end, last_rank = start + count * width, first_rank + count
        yield TokenLogprobs(
            token_ids[start:end].reshape(count, width),
            logprobs[start:end].reshape(count, width),
            ranks[first_rank:last_rank],
        )
        start, first_rank = end, last_rank

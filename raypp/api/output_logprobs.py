"""The log-probabilities of an output message: split by request, and turned into what users read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, repeat
from typing import NamedTuple

from raypp.api.detokenizer import Decoder
from raypp.messages import OutputBatch, OutputLogprobs, TokenLogprobs, unpack
from raypp.types import Logprob, Logprobs


class LogprobLists(NamedTuple):
    """Log-probabilities of n consecutive tokens of a request; see `raypp.messages.TokenLogprobs`."""

    token_ids: list[list[int]]
    logprobs: list[list[float]]
    ranks: list[int]


OfRequest = tuple[LogprobLists | None, LogprobLists | None]
"""Of its new tokens, and of its next prompt tokens."""

_NOTHING: OfRequest = (None, None)


def logprobs_per_request(batch: OutputBatch) -> Iterator[OfRequest]:
    """Yield what the message holds for each of its requests, in order."""
    if not len(batch.logprobs):
        return repeat(_NOTHING, len(batch.handles))
    message = unpack(OutputLogprobs, batch.logprobs.data)
    output = TokenLogprobs(message.token_ids, message.logprobs, message.ranks)
    prompt = TokenLogprobs(message.prompt_token_ids, message.prompt_logprobs, message.prompt_ranks)
    return zip(
        _split(message.counts.tolist(), message.widths.tolist(), output),
        _split(message.prompt_counts.tolist(), message.prompt_widths.tolist(), prompt),
        strict=True,
    )


def decoded_logprobs(lists: LogprobLists, decoder: Decoder | None) -> list[Logprobs]:
    """Return the log-probabilities of consecutive tokens, one dict for each.

    Args:
        lists: In column 0 the token that is there, then the most likely ones.
        decoder: Gives the tokens their text; None leaves it out.
    """
    decoded = []
    for token_ids, logprobs, own_rank in zip(*lists, strict=True):
        texts = repeat(None) if decoder is None else map(decoder.token_text, token_ids)
        of_position: Logprobs = dict(zip(token_ids, map(Logprob, logprobs, count(), texts), strict=False))
        # The token itself has its own rank, also where it is among the most likely ones.
        own = of_position[token_ids[0]]
        of_position[token_ids[0]] = Logprob(own.logprob, own_rank, own.decoded_token)
        decoded.append(of_position)
    return decoded


def _split(counts: Sequence[int], widths: Sequence[int], columns: TokenLogprobs) -> Iterator[LogprobLists | None]:
    most, (token_ids, logprobs, ranks) = columns.token_ids.shape[1], (column.tolist() for column in columns)
    start = 0
    for num_tokens, width in zip(counts, widths, strict=True):
        if not num_tokens:
            yield None
            continue
        of_request = slice(start, start + num_tokens)
        start += num_tokens
        own_ids, own_logprobs = token_ids[of_request], logprobs[of_request]
        if width < most:
            own_ids, own_logprobs = [row[:width] for row in own_ids], [row[:width] for row in own_logprobs]
        yield LogprobLists(own_ids, own_logprobs, ranks[of_request])

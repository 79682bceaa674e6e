"""Log-probabilities from arrays to what users read."""

from __future__ import annotations

from itertools import count, repeat

from raypp.api.detokenizer import Decoder
from raypp.messages import TokenLogprobs
from raypp.types import Logprob, Logprobs


def decoded_logprobs(arrays: TokenLogprobs, decoder: Decoder | None) -> list[Logprobs]:
    """Return the log-probabilities of consecutive tokens, one dict for each.

    Args:
        arrays: In column 0 the token that is there, then the most likely ones.
        decoder: Gives the tokens their text; None leaves it out.
    """
    columns = (arrays.token_ids.tolist(), arrays.logprobs.tolist(), arrays.ranks.tolist())
    decoded = []
    for token_ids, logprobs, own_rank in zip(*columns, strict=True):
        texts = repeat(None) if decoder is None else map(decoder.token_text, token_ids)
        of_position: Logprobs = dict(zip(token_ids, map(Logprob, logprobs, count(), texts), strict=True))
        # The token itself has its own rank, also where it is among the most likely ones.
        own = of_position[token_ids[0]]
        of_position[token_ids[0]] = Logprob(own.logprob, own_rank, own.decoded_token)
        decoded.append(of_position)
    return decoded

"""Log-probabilities from arrays to what users read."""

from __future__ import annotations

from raypp.api.detokenizer import Decoder
from raypp.messages import TokenLogprobs
from raypp.types import Logprob, Logprobs


def decoded_logprobs(arrays: TokenLogprobs, decoder: Decoder | None) -> list[Logprobs]:
    """Return the log-probabilities of consecutive tokens, one dict for each.

    Args:
        arrays: In column 0 the token that is there, then the most likely ones.
        decoder: Gives the tokens their text; None leaves it out.
    """
    texts: dict[int, str | None] = {}

    def text_of(token_id: int) -> str | None:
        if token_id not in texts:
            texts[token_id] = None if decoder is None else decoder.decode((token_id,), skip_special_tokens=False)
        return texts[token_id]

    columns = (arrays.token_ids.tolist(), arrays.logprobs.tolist(), arrays.ranks.tolist())
    decoded = []
    for token_ids, logprobs, own_rank in zip(*columns, strict=True):
        of_position: Logprobs = {}
        for rank, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True)):
            if token_id not in of_position:  # the token itself may be among the most likely ones
                of_position[token_id] = Logprob(logprob, rank or own_rank, text_of(token_id))
        decoded.append(of_position)
    return decoded

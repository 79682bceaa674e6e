"""The pictures of prompts, as the stages are told of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from raypp.messages import NO_BYTES, Bytes, StartItems, pack_inside
from raypp.prompt_items import keys_to_array
from raypp.scheduler.request_state import RequestState


def pack_items(starting: Sequence[RequestState]) -> Bytes:
    """Return a packed `StartItems` of those requests that have items; nothing when none has."""
    given = [(state.row, state.request) for state in starting]
    known = [(row, request.items, len(request.prompt_token_ids)) for row, request in given if request.items is not None]
    if not known:
        return NO_BYTES
    each = [items for _, items, _ in known]
    return pack_inside(
        StartItems(
            rows=_int32s(row for row, _, _ in known),
            position_offsets=_int32s(items.position_offset for items in each),
            num_positions=_int32s(num_tokens for _, _, num_tokens in known),
            rope_positions=np.concatenate([items.rope_positions(num_tokens) for _, items, num_tokens in known]),
            num_items=_int32s(len(items.items) for items in each),
            item_starts=_int32s(start for items in each for start in items.starts),
            item_lens=_int32s(item.num_tokens for items in each for item in items.items),
            item_keys=keys_to_array([item.key for items in each for item in items.items]),
        )
    )


def _int32s(values: Iterable[int]) -> NDArray[np.int32]:
    return np.fromiter(values, np.int32)

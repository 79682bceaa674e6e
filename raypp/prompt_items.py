"""What of a prompt is not text: images, as the encoder takes them, and where their tokens stand.

    client                        driver                        encoder                  stage 0
    image -> EncoderItem  -->   Request.items  --items-->     EncodedItem  --rows-->   the placeholders' inputs

An item is named by a hash of its content wherever it goes: in caches of embeddings, in the hashes of KV blocks, and in
the plans of steps. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

ITEM_KEY_BYTES = 16
"""Length of an item's key."""


@dataclass(frozen=True, eq=False, slots=True)
class EncoderItem:
    """One image, or the frames of a video that are encoded together. P patches of D numbers."""

    key: bytes  # ITEM_KEY_BYTES; equal keys mean equal content
    patches: NDArray[np.uint8]  # [P, D] as the pixels are; the encoder brings them to its own range
    grid_thw: tuple[int, int, int]  # patches in time, height and width; their product is P
    num_tokens: int  # placeholder tokens in the prompt, and rows of embeddings

    @classmethod
    def of(cls, patches: NDArray[np.uint8], grid_thw: tuple[int, int, int], num_tokens: int) -> EncoderItem:
        """Return the item of these patches, with its key."""
        digest = blake2b(np.asarray(grid_thw, "<i4").tobytes(), digest_size=ITEM_KEY_BYTES)
        digest.update(np.ascontiguousarray(patches).data)
        return cls(digest.digest(), patches, grid_thw, num_tokens)


@dataclass(frozen=True, eq=False, slots=True)
class PromptItems:
    """The items of one prompt, in the order of their placeholders. They may give every token its rotary positions."""

    items: tuple[EncoderItem, ...]
    starts: tuple[int, ...]  # index of each item's first placeholder in the prompt; ascending, without overlap
    merge_size: int | None  # the side of the square of patches that become one token; None: positions are as in text

    def rope_positions(self, num_tokens: int) -> NDArray[np.int32]:
        """Return the tokens' positions in time, height and width, int32 [num_tokens, 3] (M-RoPE, arXiv:2409.12191).

        None at all, [0, 3], where positions are as in text: each token's is its index.

        Text goes on by one on all axes. An image stays where it is in time and counts its rows and columns from there;
        what follows it begins behind its longer side.
        """
        if self.merge_size is None:
            return np.empty((0, 3), np.int32)
        positions = np.empty((num_tokens, 3), np.int32)
        token, next_position = 0, 0
        for start, item in zip(self.starts, self.items, strict=True):
            positions[token:start] = np.arange(next_position, next_position + start - token, dtype=np.int32)[:, None]
            next_position += start - token
            grid = np.indices(self._token_grid(item), np.int32).reshape(3, -1).T
            positions[start : start + item.num_tokens] = grid + next_position
            token = start + item.num_tokens
            next_position += self._num_positions(item)
        positions[token:] = np.arange(next_position, next_position + num_tokens - token, dtype=np.int32)[:, None]
        return positions

    @property
    def position_offset(self) -> int:
        """The rotary position of any token behind the items, minus its index."""
        return sum(self._num_positions(item) - item.num_tokens for item in self.items)

    def num_tokens_in(self, start: int, end: int) -> int:
        """Return how many of the tokens at positions `start` to `end`, the latter excluded, stand for items."""
        ends = [first + item.num_tokens for item, first in zip(self.items, self.starts, strict=True)]
        return sum(max(0, min(end, last) - max(start, first)) for first, last in zip(self.starts, ends, strict=True))

    def end_between(self, start: int, end: int) -> int:
        """Return where a chunk from `start` may end at the latest, at most at `end`, so as to end in no item."""
        for item, first in zip(self.items, self.starts, strict=True):
            if first < end < first + item.num_tokens:
                return max(start, first)
        return end

    def end_of_item(self, position: int) -> int:
        """Return the end of the item that a token belongs to, or its position if it is text."""
        ends = (
            first + item.num_tokens for item, first in zip(self.items, self.starts, strict=True) if first <= position
        )
        return max([position, *ends])

    def _token_grid(self, item: EncoderItem) -> tuple[int, int, int]:
        time, height, width = item.grid_thw
        assert self.merge_size is not None
        return time, height // self.merge_size, width // self.merge_size

    def _num_positions(self, item: EncoderItem) -> int:
        return item.num_tokens if self.merge_size is None else max(self._token_grid(item)[1:])

    def keys_in(self, start: int, end: int) -> list[bytes]:
        """Return the keys of the items that have a token at positions `start` to `end`, the latter excluded."""
        return [
            item.key
            for item, first in zip(self.items, self.starts, strict=True)
            if first < end and start < first + item.num_tokens
        ]


def unique_items(items: Iterable[EncoderItem]) -> list[EncoderItem]:
    """Return one item per key, in order of first appearance."""
    return list({item.key: item for item in items}.values())


def keys_to_array(keys: Sequence[bytes]) -> NDArray[np.uint8]:
    """Return keys as a message carries them, uint8 [len(keys), ITEM_KEY_BYTES]."""
    return np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), ITEM_KEY_BYTES)


def keys_of_array(array: NDArray[np.uint8]) -> list[bytes]:
    """Return the keys that `keys_to_array` wrote."""
    return [row.tobytes() for row in array]

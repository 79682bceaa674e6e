"""The driver's interface to encoders: orders go in, embeddings or errors come out, in any order.

The same whether they are actors or run in this process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from raypp.errors import RayppError
from raypp.prompt_items import EncoderItem


@dataclass(frozen=True, slots=True)
class ItemsStored:
    """The first stage has the embeddings of these items."""

    keys: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class ItemsDropped:
    """The first stage no longer has the embeddings of these items."""

    keys: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class ItemFailed:
    """An item cannot be encoded."""

    key: bytes
    error: RayppError


ItemEvent = ItemsStored | ItemsDropped | ItemFailed


class ItemEncoders(Protocol):
    """Encoders, and their way to the first stage."""

    def encode(self, items: Sequence[EncoderItem]) -> None:
        """Have items encoded and brought to the first stage. Each ends in an event. Does not wait."""

    def drop(self, keys: Sequence[bytes]) -> None:
        """Have the first stage drop embeddings. Each ends in an event. Does not wait."""

    def poll(self) -> list[ItemEvent]:
        """Return what happened since the last call; does not wait."""

    def stats(self) -> dict[str, Any]:
        """Return figures of the encoders, as plain data; what is known without asking them.

        `encoders`: of each and of all, see `encoder_sums` for the others, which are sums.
        """


_SUMS = {
    "num_encoder_items": ("num_items",),
    "num_encoder_cache_hits": ("cache_hits",),
    "num_encoder_tokens": ("num_tokens", "num_padding_tokens"),
    "num_encoder_padding_tokens": ("num_padding_tokens",),
}


def encoder_sums(counted: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return the counters of several encoders together, under the names that an engine's figures have for them.

    Args:
        counted: What each has counted, see `EncoderStats`; of one that died, what is known of its last life.
    """
    counters = list(counted)
    return {total: sum(of[name] for of in counters for name in names) for total, names in _SUMS.items()}

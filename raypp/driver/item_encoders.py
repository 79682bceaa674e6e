"""How the driver sees the encoders: orders go in, and what came of them comes out, in any order.

The same whether they are actors or run in this process.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        """Return figures of the encoders, as plain data; what is known without asking them."""

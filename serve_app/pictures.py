"""What the HTTP app asks before a request with images goes to the engine. Knows nothing of Ray."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from raypp.prompt_items import EncoderItem


class PictureGate(Protocol):
    """The encoders of this replica's engine, as its HTTP app sees them."""

    async def pass_on(self, items: Sequence[EncoderItem]) -> None:
        """Return when the encoders have seen the items, or when that cannot be known.

        Raises:
            QueueFullError: too many images wait already.
        """


class OpenGate:
    """Lets everything through: for engines that encode by themselves, and for models that read text alone."""

    async def pass_on(self, items: Sequence[EncoderItem]) -> None:
        """Return at once."""

"""The fault of an item that an encoder cannot encode. Needs no torch: the driver reads it."""

from __future__ import annotations

from dataclasses import dataclass

from raypp.errors import RayppError


@dataclass(frozen=True)
class ItemFault:
    """An item that cannot be encoded, through its own fault or for want of memory."""

    key: bytes
    error: RayppError

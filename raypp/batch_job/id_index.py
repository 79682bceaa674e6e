"""Which line of the input has which `custom_id`: 16 bytes per line, however long the ids are."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_DIGEST_BYTES = 16
"""Two of a billion different ids have the same digest with a chance of 1e-21."""

_NO_ID = bytes(_DIGEST_BYTES)


class IdIndexBuilder:
    """Takes the ids of a file in the order of its lines."""

    def __init__(self) -> None:
        self._digests = bytearray()

    def add(self, custom_id: str | None) -> None:
        """Take the next line's id; None for a line without one."""
        self._digests += _NO_ID if custom_id is None else _digest(custom_id)

    def build(self) -> IdIndex:
        """Return the index of all lines so far."""
        return IdIndex(np.frombuffer(bytes(self._digests), dtype=f"S{_DIGEST_BYTES}"))


class IdIndex:
    """Finds lines by their ids."""

    def __init__(self, digests: npt.NDArray[np.bytes_]) -> None:
        # numpy pads such strings with zero bytes, so that ending in one or not is the same: harmless at a fixed length.
        self._order = np.argsort(digests, kind="stable")
        self._sorted = digests[self._order]
        again = (self._sorted[1:] == self._sorted[:-1]) & (self._sorted[1:] != b"")
        self.is_duplicate: npt.NDArray[np.bool_] = np.zeros(len(digests), np.bool_)
        """Which lines have the id of an earlier line, by line."""
        self.is_duplicate[self._order[1:][again]] = True

    def find(self, custom_ids: Sequence[str]) -> npt.NDArray[np.int64]:
        """Return each id's line, 0-based, the first one of several; -1 where there is none."""
        if not len(self._sorted):
            return np.full(len(custom_ids), -1, np.int64)
        wanted = np.frombuffer(b"".join(map(_digest, custom_ids)), dtype=self._sorted.dtype)
        places = np.minimum(np.searchsorted(self._sorted, wanted), len(self._sorted) - 1)
        return np.where(self._sorted[places] == wanted, self._order[places], -1)


def _digest(custom_id: str) -> bytes:
    digest = hashlib.blake2b(custom_id.encode(errors="surrogatepass"), digest_size=_DIGEST_BYTES).digest()
    return digest if digest != _NO_ID else b"\x01" * _DIGEST_BYTES

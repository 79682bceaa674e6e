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

    def add(self, custom_id: str) -> None:
        """Take the next line's id."""
        self._digests += _digest(custom_id)

    def add_blank(self) -> None:
        """The next line has none."""
        self._digests += _NO_ID

    def build(self) -> IdIndex:
        """Return the index of all lines so far."""
        return IdIndex(np.frombuffer(bytes(self._digests), dtype=f"S{_DIGEST_BYTES}"))


class IdIndex:
    """Finds lines by their ids."""

    def __init__(self, digests: npt.NDArray[np.bytes_]) -> None:
        # numpy pads such strings with zero bytes, so that ending in one or not is the same: harmless at a fixed length.
        self._order = np.argsort(digests, kind="stable")
        self._sorted = digests[self._order]
        self.is_blank: npt.NDArray[np.bool_] = digests == b""
        """Which lines have no id, by line."""

    @property
    def num_ids(self) -> int:
        """Lines that have an id."""
        return int(len(self.is_blank) - self.is_blank.sum())

    def find(self, custom_ids: Sequence[str]) -> npt.NDArray[np.int64]:
        """Return each id's line, 0-based; -1 where there is none."""
        if not len(self._sorted):
            return np.full(len(custom_ids), -1, np.int64)
        wanted = np.frombuffer(b"".join(map(_digest, custom_ids)), dtype=self._sorted.dtype)
        places = np.minimum(np.searchsorted(self._sorted, wanted), len(self._sorted) - 1)
        return np.where(self._sorted[places] == wanted, self._order[places], -1)

    def duplicates(self, max_groups: int) -> tuple[int, list[list[int]]]:
        """Return how many ids stand on several lines, and the lines, 0-based, of the first few of them."""
        same_as_next = (self._sorted[1:] == self._sorted[:-1]) & (self._sorted[1:] != b"")
        starts = np.flatnonzero(np.diff(same_as_next.astype(np.int8), prepend=0) == 1)
        groups = []
        for start in starts:
            end = int(start) + 1
            while end < len(same_as_next) and same_as_next[end]:
                end += 1
            groups.append(self._order[start : end + 1].tolist())
            if len(groups) > 10 * max_groups:
                break
        return len(starts), sorted(groups)[:max_groups]


def _digest(custom_id: str) -> bytes:
    digest = hashlib.blake2b(custom_id.encode(errors="surrogatepass"), digest_size=_DIGEST_BYTES).digest()
    return digest if digest != _NO_ID else b"\x01" * _DIGEST_BYTES

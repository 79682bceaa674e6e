"""The input: read once to know what it is, then streamed. It is never held in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from raypp.batch_job.line import MAX_LINE_BYTES, BadLineError, Line, is_too_long, read_line
from raypp.errors import ConfigError

_BOM = b"\xef\xbb\xbf"
_BUFFER_BYTES = 1 << 20
_DIGEST_BYTES = 16
"""Two of a billion different ids have the same digest with a chance of 1e-21."""
_NO_ID = bytes(_DIGEST_BYTES)


@dataclass(frozen=True)
class ScannedInput:
    """An input, and what its lines are, by physical line."""

    path: Path
    sha256: str
    num_bytes: int
    ids: IdIndex
    is_blank: npt.NDArray[np.bool_]
    """Lines that ask for nothing."""
    is_bad: npt.NDArray[np.bool_]
    """Lines that cannot be run, whatever the engine: `bad_lines` says why."""

    @property
    def num_requests(self) -> int:
        """Lines that are not blank."""
        return int(len(self.is_blank) - self.is_blank.sum())


def scan_input(path: Path) -> ScannedInput:
    """Read a whole input.

    Raises:
        ConfigError: it cannot be read, or all its lines are blank.
    """
    digests, sha256 = bytearray(), hashlib.sha256()
    is_blank, is_bad = bytearray(), bytearray()
    num_bytes = 0

    def take(piece: bytes) -> None:
        nonlocal num_bytes
        sha256.update(piece)
        num_bytes += len(piece)

    for index, raw in _physical_lines(path, take):
        custom_id, blank, bad = None, not raw or raw.isspace(), False
        if not blank:
            try:
                custom_id = read_line(raw, index).custom_id
            except BadLineError as error:
                custom_id, bad = error.custom_id, True
        digests += digest_of(custom_id)
        is_blank.append(blank)
        is_bad.append(bad)
    ids = IdIndex(bytes(digests))
    scanned = ScannedInput(
        path,
        sha256.hexdigest(),
        num_bytes,
        ids,
        np.frombuffer(is_blank, np.bool_),
        np.frombuffer(is_bad, np.bool_) | ids.is_duplicate,
    )
    if not scanned.num_requests:
        raise ConfigError("the input has no lines", got=path, expected="one JSON object per line")
    return scanned


def stream_lines(scanned: ScannedInput, is_done: npt.NDArray[np.bool_]) -> Iterator[Line]:
    """Yield the lines that can be run and are not done, in order.

    Args:
        scanned: The input.
        is_done: By physical line; may change meanwhile.

    Raises:
        ConfigError: the file is not the one that was scanned any more.
    """
    for index, raw in _physical_lines(scanned.path):
        if index >= len(is_done):
            raise ConfigError("the input grew while it was read", got=scanned.path, hint="run the same command again")
        if is_done[index] or scanned.is_bad[index]:
            continue
        try:
            yield read_line(raw, index)
        except BadLineError as error:
            raise ConfigError(
                "the input changed while it was read", got=f"line {index + 1}: {error.message}"
            ) from error


def bad_lines(scanned: ScannedInput, is_done: npt.NDArray[np.bool_]) -> Iterator[tuple[int, BadLineError]]:
    """Yield the lines, 0-based, that cannot be run and are not done, each with what is wrong with it.

    Args:
        scanned: The input.
        is_done: By physical line; may change meanwhile.
    """
    num_left = int((scanned.is_bad & ~is_done).sum())
    if not num_left:
        return
    for index, raw in _physical_lines(scanned.path):
        if scanned.is_bad[index] and not is_done[index]:
            yield index, _error_of(scanned, raw, index)
            num_left -= 1
        if not num_left:
            return


def _error_of(scanned: ScannedInput, raw: bytes, index: int) -> BadLineError:
    try:
        custom_id = read_line(raw, index).custom_id
    except BadLineError as error:
        return error
    [first] = scanned.ids.find([custom_id])
    return BadLineError(
        "the line has a custom_id that an earlier line has",
        custom_id=custom_id,
        got=f"{custom_id!r}, as on line {first + 1}",
        expected="a custom_id of its own on every line",
        param="custom_id",
    )


def _physical_lines(path: Path, take: Callable[[bytes], None] = lambda _: None) -> Iterator[tuple[int, bytes]]:
    """Yield the number, 0-based, and the bytes of each line; of one that is too long, its beginning.

    Args:
        path: The input.
        take: Gets all bytes, in order.
    """
    most = MAX_LINE_BYTES + 1
    try:
        file = path.open("rb", buffering=_BUFFER_BYTES)
    except OSError as error:
        raise ConfigError(
            "the input cannot be read", got=f"{path}: {error.strerror}", expected="a file of JSON lines"
        ) from error
    with file:
        index = 0
        while raw := file.readline(most):
            take(raw)
            if is_too_long(raw):
                while (rest := file.readline(most)) and not rest.endswith(b"\n"):
                    take(rest)
                take(rest)
            yield index, raw.removeprefix(_BOM) if index == 0 else raw
            index += 1


class IdIndex:
    """Finds lines by their ids.

    Args:
        all_digests: Of the ids of all lines, see `digest_of`, one after the other.
    """

    def __init__(self, all_digests: bytes) -> None:
        digests = np.frombuffer(all_digests, dtype=f"S{_DIGEST_BYTES}")
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
        wanted = np.frombuffer(b"".join(map(digest_of, custom_ids)), dtype=self._sorted.dtype)
        places = np.minimum(np.searchsorted(self._sorted, wanted), len(self._sorted) - 1)
        return np.where(self._sorted[places] == wanted, self._order[places], -1)


def digest_of(custom_id: str | None) -> bytes:
    """Return what stands for an id in an index; None is a line without one."""
    if custom_id is None:
        return _NO_ID
    digest = hashlib.blake2b(custom_id.encode(errors="surrogatepass"), digest_size=_DIGEST_BYTES).digest()
    return digest if digest != _NO_ID else b"\x01" * _DIGEST_BYTES

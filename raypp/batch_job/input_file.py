"""The input: read once to know what it is, then streamed. It is never held in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from raypp.batch_job.id_index import IdIndex, IdIndexBuilder
from raypp.batch_job.line import BadLineError, Line, read_line
from raypp.errors import ConfigError

_BOM = b"\xef\xbb\xbf"
_MAX_SHOWN = 5
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class ScannedInput:
    """An input whose every line has a name of its own."""

    path: Path
    sha256: str
    num_bytes: int
    ids: IdIndex

    @property
    def num_lines(self) -> int:
        """Physical lines, blank ones included."""
        return len(self.ids.is_blank)


def scan_input(path: Path) -> ScannedInput:
    """Read a whole input and check that every line can be answered under a name of its own.

    Raises:
        ConfigError: it cannot be read, lines have no `custom_id`, or an id stands on several lines.
    """
    ids, sha256, num_bytes = IdIndexBuilder(), hashlib.sha256(), 0
    complaints: list[str] = []
    num_bad = 0
    with _open(path) as file:
        for index, raw in enumerate(file):
            sha256.update(raw)
            num_bytes += len(raw)
            if _is_blank(raw):
                ids.add_blank()
                continue
            try:
                ids.add(read_line(_without_bom(raw, index), index).custom_id)
            except BadLineError as error:
                ids.add_blank()
                num_bad += 1
                if len(complaints) < _MAX_SHOWN:
                    complaints.append(f"line {index + 1}: {error.message}, {error.got}")
    if num_bad:
        raise ConfigError(
            "1 line of the input cannot be answered: it is no JSON object with a custom_id"
            if num_bad == 1
            else f"{num_bad} lines of the input cannot be answered: they are no JSON objects with a custom_id",
            got=_listed(complaints, num_bad),
            expected='on every line {"custom_id": "...", ...}',
            hint="no line was run",
        )
    index_of_ids = ids.build()
    _check_unique(path, index_of_ids)
    if not index_of_ids.num_ids:
        raise ConfigError("the input has no lines", got=path, expected="one JSON object per line")
    return ScannedInput(path, sha256.hexdigest(), num_bytes, index_of_ids)


def stream_lines(path: Path, is_done: npt.NDArray[np.bool_]) -> Iterator[Line]:
    """Yield the lines that are not done, in order.

    Args:
        path: An input that was scanned.
        is_done: By physical line; may change meanwhile.

    Raises:
        ConfigError: the file is not the one that was scanned any more.
    """
    with _open(path) as file:
        for index, raw in enumerate(file):
            if index >= len(is_done):
                raise ConfigError("the input grew while it was read", got=path, hint="run the same command again")
            if is_done[index]:
                continue
            try:
                yield read_line(_without_bom(raw, index), index)
            except BadLineError as error:
                raise ConfigError(
                    "the input changed while it was read", got=f"line {index + 1}: {error.message}"
                ) from error


def _check_unique(path: Path, ids: IdIndex) -> None:
    num_duplicates, groups = ids.duplicates(_MAX_SHOWN)
    if not num_duplicates:
        return
    names = _ids_on_lines(path, {group[0] for group in groups})
    shown = [f"{names[group[0]]!r} on lines {', '.join(str(i + 1) for i in group[:_MAX_SHOWN])}" for group in groups]
    raise ConfigError(
        f"{num_duplicates} custom_id{' of the input is' if num_duplicates == 1 else 's of the input are'} not unique",
        got=_listed(shown, num_duplicates),
        expected="a custom_id of its own on every line",
        hint="no line was run",
    )


def _ids_on_lines(path: Path, wanted: set[int]) -> dict[int, str]:
    names: dict[int, str] = {}
    with _open(path) as file:
        for index, raw in enumerate(file):
            if index in wanted:
                names[index] = read_line(_without_bom(raw, index), index).custom_id
            if len(names) == len(wanted):
                break
    return names


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb", buffering=_BUFFER_BYTES)
    except OSError as error:
        raise ConfigError(
            "the input cannot be read", got=f"{path}: {error.strerror}", expected="a file of JSON lines"
        ) from error


def _is_blank(raw: bytes) -> bool:
    return raw.isspace() or raw == _BOM


def _without_bom(raw: bytes, index: int) -> bytes:
    return raw.removeprefix(_BOM) if index == 0 else raw


def _listed(shown: list[str], total: int) -> str:
    return "; ".join(shown) + ("; ..." if total > len(shown) else "")

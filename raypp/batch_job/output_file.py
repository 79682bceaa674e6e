"""The files that a job writes: answers of lines that were completed, errors of lines that failed, and the manifest.

Lines are only ever appended, by one process at a time, and what is there is what is done.

A line counts when its newline is there. A process that is killed leaves at most one line torn, the last; the next run
cuts it off. A machine that crashes may lose what was not yet synced; those lines are then computed again.

The manifest holds what the answers depend on. A second run of the same command finds it and goes on; a run that would
answer differently is refused, since one file would then hold answers to two questions.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import stat
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic_core import from_json

from raypp.batch_job.answer import Answer
from raypp.batch_job.input_file import IdIndex, ScannedInput
from raypp.errors import ConfigError, ResourceError

_LOCK_RETRY_S = 0.1
_IDS_PER_LOOKUP = 8192
_VERSION = 2  # of the manifest's format

logger = logging.getLogger(__name__)


class _Owner(NamedTuple):
    """Which line of the input a line answers."""

    custom_id: str | None
    line: int | None  # of the input, 0-based, where it is said: several lines may claim one custom_id, or have none


class OutputFile:
    """A job's output, or its error file. Nothing may be done with it before it is locked."""

    def __init__(self, path: Path, name: str = "the output") -> None:
        """Open or create it.

        Args:
            path: Where it is.
            name: What errors call it.

        Raises:
            ConfigError: it cannot be written, or is no regular file.
        """
        self._path = path
        self._name = name
        try:
            existed = path.exists()
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(
                f"{self._name} cannot be written",
                got=f"{path}: {error.strerror}",
                expected="a file in a folder that exists",
            ) from error
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            os.close(self._fd)
            raise ConfigError(
                f"{self._name} is no regular file",
                got=path,
                expected="a file on a disk: what it holds says what is done, and a torn line is cut off",
            )
        if not existed:
            sync_folder(path.parent)
        self._num_bytes = 0
        self._is_dirty = False
        self._sync_lock = threading.Lock()

    async def lock(self, timeout_s: float = 10.0) -> None:
        """Keep other processes out until this one closes it or ends.

        Args:
            timeout_s: How long to wait for another one to end: a stopped job's process may take a moment.

        Raises:
            ConfigError: another process is writing it.
        """
        deadline = time.monotonic() + timeout_s
        while not self._try_lock():
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"another process is writing {self._name}",
                    got=self._path,
                    expected=f"that it ends within {timeout_s:g} s",
                    hint="wait for it or end it, then run the same command again",
                )
            await asyncio.sleep(_LOCK_RETRY_S)
        self._num_bytes = os.fstat(self._fd).st_size

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing in it yet."""
        return self._num_bytes == 0

    def clear(self) -> None:
        """Throw away what it holds."""
        self._truncate(0)

    def repair(self, ids: IdIndex, is_done: npt.NDArray[np.bool_]) -> int:
        """Cut off a torn last line; return how many lines of the input are answered here.

        Args:
            ids: The input's.
            is_done: By physical line of the input; those that are answered here become true.

        Raises:
            ConfigError: it holds lines that this job cannot have written.
        """
        batch: list[_Owner] = []
        num_good_bytes = num_lines = 0
        with self._path.open("rb", buffering=1 << 20) as file:
            for raw in file:
                if (owner := _owner(raw)) is None:  # torn, or foreign
                    if num_good_bytes + len(raw) < self._num_bytes:
                        raise self._not_ours(f"line {num_lines + 1} is no line of an output: {raw[:60]!r}")
                    break
                num_good_bytes += len(raw)
                num_lines += 1
                batch.append(owner)
                if len(batch) == _IDS_PER_LOOKUP:
                    self._mark(batch, ids, is_done)
                    batch = []
        if batch:
            self._mark(batch, ids, is_done)
        if num_good_bytes < self._num_bytes:
            logger.warning("cutting a torn last line of %d bytes off %s", self._num_bytes - num_good_bytes, self._path)
            self._truncate(num_good_bytes)
        return num_lines

    def append(self, line: bytes) -> None:
        """Add a line. It survives the end of this process at once, that of the machine after `sync`.

        Raises:
            ResourceError: the disk takes no more. No part of the line remains, if the disk lets go of it.
        """
        data = memoryview(line + b"\n")
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            with suppress(ResourceError):  # then the next run cuts it off
                self._truncate(self._num_bytes)
            raise self._disk_error(error) from error
        self._num_bytes += len(line) + 1
        self._is_dirty = True

    def sync(self) -> None:
        """Wait until the disk has everything. May be called from several threads.

        Raises:
            ResourceError: the disk does not take it.
        """
        with self._sync_lock:  # a second caller waits for the first one's disk, too
            if self._is_dirty:
                self._is_dirty = False
                try:
                    os.fsync(self._fd)
                except OSError as error:
                    raise self._disk_error(error) from error

    def close(self) -> None:
        """Let others in."""
        os.close(self._fd)

    def _try_lock(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:  # not every network file system can
            logger.warning("%s cannot be locked (%s): make sure that only one job writes it", self._path, error)
        return True

    def _mark(self, owners: list[_Owner], ids: IdIndex, is_done: npt.NDArray[np.bool_]) -> None:
        lines = ids.find([owner.custom_id or "" for owner in owners]).tolist()
        for line_of_id, owner in zip(lines, owners, strict=True):
            line = line_of_id if owner.line is None else owner.line
            is_its_own = owner.custom_id is None or line == line_of_id
            if not 0 <= line < len(is_done) or not (is_its_own or ids.is_duplicate[line]):
                where = "in the input" if owner.line is None else f"on line {line + 1} of the input"
                raise self._not_ours(f"custom_id {owner.custom_id!r} is not {where}")
            if is_done[line]:
                raise self._not_ours(f"the answer to line {line + 1}, custom_id {owner.custom_id!r}, is there twice")
            is_done[line] = True

    def _not_ours(self, got: str) -> ConfigError:
        return ConfigError(
            f"{self._name} holds something that this job did not write",
            got=f"{self._path}: {got}",
            hint="name another output, or start anew with --overwrite",
        )

    def _disk_error(self, error: OSError) -> ResourceError:
        return ResourceError(
            f"{self._name} cannot be written any more",
            got=f"{self._path}: {error.strerror}",
            hint="make room and run the same command again: what is there is kept",
        )

    def _truncate(self, num_bytes: int) -> None:
        try:
            os.ftruncate(self._fd, num_bytes)
            self._num_bytes = num_bytes
            os.fsync(self._fd)
        except OSError as error:
            raise self._disk_error(error) from error


def _owner(raw: bytes) -> _Owner | None:
    if not raw.endswith(b"\n"):
        return None
    try:
        fields = from_json(raw)
    except ValueError:
        return None
    if not isinstance(fields, dict):
        return None
    custom_id, error = fields.get("custom_id"), fields.get("error")
    line = error.get("line") if isinstance(error, dict) else None
    custom_id = custom_id if isinstance(custom_id, str) else None
    index = line - 1 if isinstance(line, int) else None
    return None if custom_id is None and index is None else _Owner(custom_id, index)


class AnswerFiles:
    """The output and the error file. Nothing may be done with them before they are locked."""

    def __init__(self, output_path: Path, error_path: Path) -> None:
        """Open or create them.

        Raises:
            ConfigError: one cannot be written, or is no regular file.
        """
        with ExitStack() as opened:
            self._output = OutputFile(output_path)
            opened.callback(self._output.close)
            self._errors = OutputFile(error_path, "the error file")
            opened.pop_all()
        self._files = (self._output, self._errors)

    async def lock(self) -> None:
        """Keep other processes out, as `OutputFile.lock` does.

        Raises:
            ConfigError: another process is writing one of them.
        """
        for file in self._files:
            await file.lock()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing in them yet."""
        return all(file.is_empty for file in self._files)

    def clear(self) -> None:
        """Throw away what they hold."""
        for file in self._files:
            file.clear()

    def repair(self, scanned: ScannedInput) -> tuple[npt.NDArray[np.bool_], int]:
        """Cut off torn last lines; return which lines of the input are done, by physical line, and how many failed.

        Raises:
            ConfigError: they hold lines that this job cannot have written.
        """
        is_done = scanned.is_blank.copy()
        self._output.repair(scanned.ids, is_done)
        return is_done, self._errors.repair(scanned.ids, is_done)

    def append(self, answer: Answer) -> None:
        """Add a line's answer where it belongs, as `OutputFile.append` does.

        Raises:
            ResourceError: the disk takes no more.
        """
        (self._errors if answer.is_error else self._output).append(answer.record)

    def sync(self) -> None:
        """Wait until the disk has everything. May be called from several threads.

        Raises:
            ResourceError: the disk does not take it.
        """
        for file in self._files:
            file.sync()

    def close(self) -> None:
        """Let others in."""
        for file in self._files:
            file.close()


@dataclass(frozen=True)
class Manifest:
    """One job."""

    input_sha256: str
    input_bytes: int
    num_requests: int
    settings: Mapping[str, Any]
    """What the answers depend on, besides the input: flat, plain values."""
    version: int = _VERSION

    def write(self, path: Path) -> None:
        """Write it so that after a crash it is there as a whole or not at all.

        Raises:
            ConfigError: the folder cannot be written.
        """
        temporary = path.with_name(path.name + ".tmp")
        try:
            with temporary.open("w", encoding="utf-8") as file:
                json.dump(asdict(self), file, indent=1, ensure_ascii=False)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync_folder(path.parent)
        except OSError as error:
            raise ConfigError("the job's manifest cannot be written", got=f"{path}: {error.strerror}") from error

    @classmethod
    def read(cls, path: Path) -> Manifest | None:
        """Return the manifest of an earlier run, None if there is none.

        Raises:
            ConfigError: it cannot be read.
        """
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(
                "the manifest of an earlier run cannot be read",
                got=f"{path}: {error}",
                hint="name another output, or start anew with --overwrite",
            ) from error

    def check_same_job(self, earlier: Manifest, path: Path) -> None:
        """Compare with the manifest of an earlier run.

        Raises:
            ConfigError: that was another job; what differs is named.
        """
        differences = []
        if earlier.version != self.version:
            differences.append(f"format of the manifest: {earlier.version} then, {self.version} now")
        if earlier.input_sha256 != self.input_sha256:
            differences.append(
                f"the input: {earlier.num_requests} requests in {earlier.input_bytes} bytes then, "
                f"{self.num_requests} in {self.input_bytes} now, sha256 {earlier.input_sha256[:12]}... "
                f"then, {self.input_sha256[:12]}... now"
            )
        for name in sorted({*earlier.settings, *self.settings}):
            then, now = earlier.settings.get(name), self.settings.get(name)
            if then != now:
                differences.append(f"{name}: {then!r} then, {now!r} now")
        if differences:
            raise ConfigError(
                "the output was written by a job with other settings",
                got="; ".join(differences),
                expected=f"what {path} says",
                hint="run the old command, name another output, or start anew with --overwrite",
            )


def sync_folder(folder: Path) -> None:
    """Make renamed and new files in a folder survive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

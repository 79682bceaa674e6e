"""What a job is: its input and everything its answers depend on, kept beside the output.

A second run of the same command finds it and goes on; a run that would answer differently is refused, since one file
would then hold answers to two questions.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from raypp.errors import ConfigError

_VERSION = 2


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

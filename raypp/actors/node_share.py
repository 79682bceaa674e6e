"""What a stage on another node than the engine's owner finds out there, and what must be the same on both."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from raypp.errors import ConfigError, ModelLoadError

_PACKAGES = ("raypp", "torch", "transformers", "triton", "flashinfer-python")
_FILES = ("config.json", "params.json", "*.safetensors", "*.safetensors.index.json")
_SAMPLE_BYTES = 1 << 16
_OF_OWNER = "the node that starts the engine"


@dataclass(frozen=True)
class NodeShare:
    """What a stage finds out on its own node: the plan was made on another one."""

    model: str  # its name; files lie elsewhere here, or are still to be fetched
    revision: str | None  # the version of it
    num_stages: int | None  # that share the node's cores; None when the threads are given
    versions: Mapping[str, str]  # of packages on the owner's node
    files: Mapping[str, str]  # of the model on the owner's node

    def check_versions(self, who: str, host: str) -> None:
        """Compare packages that both nodes have; builds of one version for CPUs and for GPUs are the same.

        Args:
            who: The stage.
            host: The address of this node.

        Raises:
            ConfigError: a version differs.
        """
        if differing := differences(self.versions, versions_here(), host):
            raise ConfigError(
                f"the node of {who}, {host}, has other versions than {_OF_OWNER}",
                got=differing,
                expected="the same on all nodes",
                hint="on each node, make install at the same commit of raypp",
            )

    def check_files(self, who: str, host: str, folder: Path) -> None:
        """Compare the model's files that both nodes have.

        Args:
            who: The stage.
            host: The address of this node.
            folder: Of the model, here.

        Raises:
            ModelLoadError: a file differs.
        """
        if differing := differences(self.files, files_of(folder), host):
            raise ModelLoadError(
                f"the model of {who} on {host} is another one than on {_OF_OWNER}",
                got=f"{folder}: {differing}",
                expected="the same files on all nodes",
                hint="copy the folder to each node again; of a Hugging Face id, name a commit with revision",
            )


def versions_here() -> dict[str, str]:
    """Return the versions of installed packages that stages depend on, without their builds (`+cu130`)."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {name: version if name == "raypp" else version.partition("+")[0] for name, version in found.items()}


def files_of(folder: Path) -> dict[str, str]:
    """Return what tells a model's files from others, by name: the size, and a hash of begin, middle and end."""
    return {path.name: _print_of(path) for pattern in _FILES for path in sorted(folder.glob(pattern))}


def _print_of(path: Path) -> str:
    size, digest = path.stat().st_size, hashlib.sha256()
    with path.open("rb") as file:
        for offset in (0, size // 2, max(size - _SAMPLE_BYTES, 0)):
            file.seek(offset)
            digest.update(file.read(_SAMPLE_BYTES))
    return f"{size:,} bytes, {digest.hexdigest()[:12]}"


def differences(of_owner: Mapping[str, str], here: Mapping[str, str], host: str) -> str:
    """Return in words what a node has otherwise than the owner's; of what both have."""
    differing = [name for name in of_owner if here.get(name, of_owner[name]) != of_owner[name]]
    return "; ".join(f"{name}: {here[name]} on {host}, {of_owner[name]} there" for name in differing)

"""Which tensors a checkpoint holds, by its files' headers alone: planning must not wait for torch, or gigabytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

from raypp.errors import ModelLoadError

PICKLED_FILE = "pytorch_model.bin"
_MAX_HEADER_BYTES = 100_000_000  # what safetensors itself accepts


def checkpoint_shapes(path: Path) -> Mapping[str, tuple[int, ...]]:
    """Return the shape of every tensor in a directory's safetensors files, else in its `pytorch_model.bin`.

    Raises:
        ModelLoadError: no such files, or not readable.
    """
    files = sorted(path.glob("*.safetensors"))
    if files:
        return {name: shape for file in files for name, shape in _header_shapes(file).items()}
    if not (path / PICKLED_FILE).is_file():
        raise ModelLoadError(
            f"{path} has no weights",
            got=sorted(file.name for file in path.iterdir()) if path.is_dir() else "no such directory",
            expected=f"*.safetensors, or {PICKLED_FILE}",
            hint='load_format="dummy" makes random weights',
        )
    from raypp.models.pickled_weights import PickledWeights

    return PickledWeights(path / PICKLED_FILE).shapes()


def _header_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Return a file's shapes. Format: the header's length in 8 bytes, the header in JSON, the data."""
    try:
        with file.open("rb") as opened:
            (size,) = struct.unpack("<Q", opened.read(8))
            if size > _MAX_HEADER_BYTES:
                raise ValueError(f"a header of {size} bytes")
            header = json.loads(opened.read(size))
        return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ModelLoadError(
            f"{file} is truncated or not a safetensors file",
            got=f"{type(error).__name__}: {error} ({file.stat().st_size} bytes)",
            hint="download it again",
        ) from error

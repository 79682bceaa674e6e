"""Lists the tensors of a checkpoint from its files' headers alone, so that planning waits for neither torch nor data.

One rule says which files are a checkpoint, for planning and for loading: those that `model.safetensors.index.json`
names, or `model.safetensors`; beside them what MTP heads are kept in without being listed, such as `mtp.safetensors`;
for a draft head also `pytorch_model.bin`. Without these, `consolidated.safetensors.index.json`, or files whose names
begin so: Mistral's own form, whose tensors have the names here that transformers gives them.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from raypp.errors import ModelLoadError
from raypp.models.mistral_format import PARAMS_FILE, name_in_transformers

PICKLED_FILE = "pytorch_model.bin"
_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
OWN_PREFIX = "consolidated"
_OWN_FILES = f"{OWN_PREFIX}*.safetensors"
_OWN_INDEX = f"{OWN_PREFIX}.safetensors.index.json"
"""In Mistral's own form."""
_OF_MTP_HEADS = "mtp"
CHECKPOINT_FILES = f"{_FILE}, the files that {_INDEX} names, and *{_OF_MTP_HEADS}*.safetensors beside them"
"""Where tensors are looked for."""
PLAIN_TYPES = ("F64", "F32", "F16", "BF16")
"""Of tensors that are not quantized."""
_MAX_HEADER_BYTES = 100_000_000  # what safetensors itself accepts
_COMPARED_AT_ONCE = 1 << 24


_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
"""Of a language model beside a tower, and by itself."""


def name_of_text(name: str) -> str:
    """Return what a tensor or module is called in the language model, if it is one of a model that has a tower."""
    for prefix, own in _PREFIXES.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name


class StoredTensor(NamedTuple):
    """Where a tensor lies."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file
    end: int


def has_safetensors(path: Path) -> bool:
    """Return whether a directory holds a checkpoint in safetensors files."""
    return _has_usual_files(path) or any(path.glob(_OWN_FILES))


def has_usual_form(path: Path) -> bool:
    """Return whether a directory holds config.json and a checkpoint as transformers has it, with all of its files."""
    if not (path / "config.json").is_file() or not _has_usual_files(path):
        return False
    return not (path / _INDEX).is_file() or all((path / file).is_file() for file in {*file_of_tensor(path).values()})


def has_own_form(path: Path) -> bool:
    """Return whether a model is in Mistral's own form: params.json describes it, not config.json."""
    if not (path / PARAMS_FILE).is_file():
        return False
    return not (path / "config.json").is_file() or (not _has_usual_files(path) and any(path.glob(_OWN_FILES)))


def names_in_file(file: str, stored: Iterable[str]) -> dict[str, str]:
    """Return what the tensors of a file are called there, by the names that transformers gives them."""
    return {name_in_transformers(name) if file.startswith(OWN_PREFIX) else name: name for name in stored}


def _has_usual_files(path: Path) -> bool:
    return any((path / name).is_file() for name in (_FILE, _INDEX))


def file_of_tensor(path: Path) -> dict[str, str]:
    """Return the name of the safetensors file of each tensor in a directory; reads its index, or one header.

    And the headers of files that are named after MTP heads and not listed; a tensor that is listed is where that says.

    Raises:
        ModelLoadError: there is no checkpoint, or it is not readable.
    """
    files = _listed_files(path)
    listed = set(files.values())
    for file in sorted(path.glob("*.safetensors")):
        if _OF_MTP_HEADS in file.name.lower() and file.name not in listed:
            files = dict.fromkeys(_header(file), file.name) | files
    return files


def _listed_files(path: Path) -> dict[str, str]:
    is_own = not _has_usual_files(path)
    index = path / (_OWN_INDEX if is_own else _INDEX)
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = {str(name): str(file) for name, file in weight_map.items()}
            return {known: file for name, file in files.items() for known in names_in_file(file, [name])}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelLoadError(
                f"{index} is not an index of safetensors files",
                got=f"{type(error).__name__}: {error}",
                expected='an object with "weight_map": {tensor: file}',
            ) from error
    found = sorted(path.glob(_OWN_FILES)) if is_own else [path / _FILE]
    if not found:
        raise no_weights(path)
    return {name: file.name for file in found for name in _header(file)}


def no_weights(path: Path, *, beside: str = "") -> ModelLoadError:
    """Return the error for a directory without a checkpoint; `beside` names another form that would be one."""
    return ModelLoadError(
        f"{path} has no weights",
        got=sorted(file.name for file in path.iterdir()) if path.is_dir() else "no such directory",
        expected=f"{_FILE}, or {_INDEX} and its files; or {_OWN_FILES} in Mistral's own form{beside}",
        hint="load_format=dummy makes random weights; other formats must be converted to safetensors first",
    )


def lacks_file(path: Path, file_name: str) -> ModelLoadError:
    """Return the error for a file that an index names and that is not there."""
    return ModelLoadError(f"{path} lacks {file_name}", got="no such file", expected="named by its index")


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return every tensor in a directory's safetensors files.

    Raises:
        ModelLoadError: no such files, or not readable.
    """
    files = file_of_tensor(path)
    headers = {file: _header(path / file) for file in dict.fromkeys(files.values())}
    found = {name: tensor for header in headers.values() for name, tensor in header.items()}  # the index may be wrong
    return {name: headers[file].get(name, found[name]) for name, file in files.items() if name in found}


def are_alike(one: StoredTensor, other: StoredTensor) -> bool:
    """Return whether two tensors hold the same bytes of the same type. Reads both, up to the first difference."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with (
        one.file.open("rb") as one_file,
        other.file.open("rb") as other_file,
        mmap.mmap(one_file.fileno(), 0, access=mmap.ACCESS_READ) as one_bytes,
        mmap.mmap(other_file.fileno(), 0, access=mmap.ACCESS_READ) as other_bytes,
    ):
        size = one.end - one.start
        return all(
            one_bytes[one.start + at : min(one.start + at + _COMPARED_AT_ONCE, one.end)]
            == other_bytes[other.start + at : min(other.start + at + _COMPARED_AT_ONCE, other.end)]
            for at in range(0, size, _COMPARED_AT_ONCE)
        )


def _header(file: Path) -> dict[str, StoredTensor]:
    """Return a file's tensors. Format: the header's length in 8 bytes, the header in JSON, the data."""
    if not file.is_file():
        raise lacks_file(file.parent, file.name)
    try:
        with file.open("rb") as opened:
            (size,) = struct.unpack("<Q", opened.read(8))
            if size > _MAX_HEADER_BYTES:
                raise ValueError(f"a header of {size} bytes")
            header = json.loads(opened.read(size))
        num_bytes = file.stat().st_size
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        names = names_in_file(file.name, entries)
        return {known: _stored(file, entries[name], 8 + size, num_bytes) for known, name in names.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ModelLoadError(
            f"{file} is truncated or not a safetensors file",
            got=f"{type(error).__name__}: {error} ({file.stat().st_size} bytes)",
            hint="download it again",
        ) from error


def _stored(file: Path, entry: Mapping[str, Any], data_start: int, num_bytes: int) -> StoredTensor:
    start, end = (data_start + int(offset) for offset in entry["data_offsets"])
    if end > num_bytes:
        raise ValueError(f"data up to byte {end}")
    return StoredTensor(file, str(entry["dtype"]), tuple(entry["shape"]), start, end)

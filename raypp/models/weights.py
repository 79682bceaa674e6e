"""Reads weights from safetensors files, or draws them at random; only the tensors that are asked for."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from safetensors import SafetensorError, safe_open

from raypp.errors import ModelLoadError
from raypp.models.checkpoint_names import file_of_tensor, lacks_file
from raypp.ops.weight import Weight

_LOG = logging.getLogger(__name__)
_FLOATS = ("F64", "F32", "F16", "BF16")


class WeightSource(Protocol):
    """Gives a model's tensors by the names of its checkpoint."""

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor, converted to `dtype`, in host memory or already where it is going.

        Raises:
            ModelLoadError: there is none of that name and shape.
        """

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor that a checkpoint may have or not, None if it has none of that name."""

    def unread(self) -> Collection[str]:
        """Return the names of the tensors that are there and that nobody asked for yet."""


class CheckpointWeights:
    """A directory with `model.safetensors`, or with shards and `model.safetensors.index.json`.

    Files are mapped, not read: a stage touches the pages of its own tensors.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open_files: dict[str, Any] = {}
        self._read: set[str] = set()

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor `name`, which must be of `shape`, as `dtype`; integers only where those are asked for.

        Raises:
            ModelLoadError: missing, of another shape or kind, or in a file that is truncated or no safetensors.
        """
        file_name = self._file_of_tensor.get(name)
        if file_name is None:
            raise missing_tensor(self._path, name, shape, self._file_of_tensor)
        self._read.add(name)
        file = self._path / file_name
        try:
            found = self._open(file_name).get_slice(name)
            got_shape, got_dtype = tuple(found.get_shape()), str(found.get_dtype())
            check_tensor(file, name, (got_shape, got_dtype), (shape, dtype), holds_floats=got_dtype in _FLOATS)
            tensor: torch.Tensor = self._open(file_name).get_tensor(name)
        except SafetensorError as error:
            raise ModelLoadError(f"{file} cannot be read for tensor {name}", got=str(error)) from error
        # Never the mapping itself: a file that is replaced later must not change or kill a running engine.
        return tensor.to(dtype, copy=True)

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor, None if there is none of that name."""
        file_name = self._file_of_tensor.get(name)
        return None if file_name is None else tuple(self._open(file_name).get_slice(name).get_shape())

    def unread(self) -> Collection[str]:
        """Return the names of the tensors that are there and that nobody asked for yet."""
        return self._file_of_tensor.keys() - self._read

    @cached_property
    def _file_of_tensor(self) -> dict[str, str]:
        """Which file holds which tensor."""
        return file_of_tensor(self._path)

    def _open(self, file_name: str) -> Any:
        if file_name not in self._open_files:
            file = self._path / file_name
            if not file.is_file():
                raise lacks_file(self._path, file_name)
            try:
                self._open_files[file_name] = safe_open(file, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise ModelLoadError(
                    f"{file} is truncated or not a safetensors file",
                    got=f"{error} ({file.stat().st_size} bytes)",
                    hint="download it again",
                ) from error
        return self._open_files[file_name]


def missing_tensor(path: Path, name: str, shape: tuple[int, ...], there: Collection[str]) -> ModelLoadError:
    """Return the error for a tensor that is not among those that are `there`."""
    return ModelLoadError(
        f"{path} has no tensor {name}",
        got=f"{len(there)} tensors, such as {', '.join(sorted(there)[:3])}",
        expected=f"{name} {list(shape)}",
    )


def check_tensor(
    file: Path,
    name: str,
    got: tuple[tuple[int, ...], str],
    wanted: tuple[tuple[int, ...], torch.dtype],
    *,
    holds_floats: bool,
) -> None:
    """Refuse a tensor that is not what the model needs.

    Args:
        file: Where it is.
        name: Its name there.
        got: Its shape, and the name of its type.
        wanted: The shape that it must have, and the type that it becomes.
        holds_floats: Whether its type is one of those that raypp computes with.

    Raises:
        ModelLoadError: floats where integers are needed or the other way round, or another shape.
    """
    (got_shape, got_type), (shape, dtype) = got, wanted
    if holds_floats != dtype.is_floating_point:
        raise ModelLoadError(
            f"{file}: tensor {name} is not of a type that raypp computes with",
            got=got_type,
            expected=f"one of {', '.join(_FLOATS)}" if dtype.is_floating_point else "integers",
            hint="quantized checkpoints are not supported",
        )
    if got_shape != shape:
        raise ModelLoadError(
            f"{file}: tensor {name} has the wrong shape",
            got=list(got_shape),
            expected=f"{list(shape)}, by config.json",
        )


class DummyWeights:
    """Random weights: each tensor depends on the seed and its name alone, so any partition gives the same model.

    Norms are one, everything else is normal with a standard deviation of 0.02. The noise repeats after a prime number
    of elements, so that large models are made at the speed of copying, yet no two rows of a matrix are alike.

    Args:
        seed: Of all tensors.
        device: Where they are made. The noise is the same on any.
    """

    _PERIOD = 1_048_573
    _STANDARD_DEVIATION = 0.02

    def __init__(self, seed: int, device: torch.device | None = None) -> None:
        self._seed = seed
        self._device = device

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the random tensor `name` of `shape`; integers are all zero."""
        if not dtype.is_floating_point:
            return torch.zeros(shape, dtype=dtype, device=self._device)
        if name.endswith(("norm.weight", "norm1.weight", "norm2.weight")):
            return torch.ones(shape, dtype=dtype, device=self._device)
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        count = min(tensor.numel(), self._PERIOD)
        noise = torch.randn(count, generator=generator).mul_(self._STANDARD_DEVIATION).to(dtype).to(self._device)
        for chunk in torch.split(tensor.view(-1), self._PERIOD):
            chunk.copy_(noise[: len(chunk)])
        return tensor

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Return None: what a checkpoint need not have is not there."""
        return None

    def unread(self) -> Collection[str]:
        """Return nothing: what nobody asks for is not there."""
        return ()


_NAMED_AT_MOST = 8
_COMPUTED = "rotary_emb.inv_freq"  # stored by old checkpoints; follows from config.json


def warn_of_unread(source: WeightSource, whose: str, is_own: Callable[[str], bool]) -> None:
    """Log the names of tensors that nobody reads: config.json does not speak of them, so the model may be another one.

    Args:
        source: Where all was read from.
        whose: Whose tensors they are, for the log.
        is_own: Whether a tensor is looked after here; each has to be in one place.
    """
    names = sorted(name for name in source.unread() if is_own(name) and not name.endswith(_COMPUTED))
    if names:
        more = f" and {len(names) - _NAMED_AT_MOST} more" if len(names) > _NAMED_AT_MOST else ""
        _LOG.warning(
            "%s: %d tensors of the checkpoint are not used: %s%s; if the model has such parts, its config.json or its "
            "architecture is not the right one, and its texts will be wrong",
            whose,
            len(names),
            ", ".join(names[:_NAMED_AT_MOST]),
            more,
        )


def open_weights(
    load_format: Literal["auto", "dummy"], model_path: str, seed: int, device: torch.device
) -> WeightSource:
    """Return where a model's weights come from, as the configuration says; random ones are made on the device."""
    return DummyWeights(seed, device) if load_format == "dummy" else CheckpointWeights(Path(model_path))


class WeightReader:
    """Reads tensors below a prefix, of one type, onto one device.

    Args:
        source: Where they come from.
        dtype: What they become.
        device: Where they go.
        prefix: Before every name, e.g. `model.layers.3.`.
    """

    def __init__(self, source: WeightSource, dtype: torch.dtype, device: torch.device, prefix: str = "") -> None:
        self._source = source
        self._dtype = dtype
        self.device = device
        self.prefix = prefix

    def below(self, prefix: str) -> WeightReader:
        """Return a reader of the tensors below a further prefix."""
        return WeightReader(self._source, self._dtype, self.device, self.prefix + prefix)

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """Return one tensor."""
        return self._source.get(self.prefix + name, shape, self._dtype).to(self.device)

    def number(self, name: str) -> float | None:
        """Return a tensor of one element that the checkpoint may have or not, None if it has none of that name."""
        shape = self._source.shape_of(self.prefix + name)
        if shape is None:
            return None
        if math.prod(shape) != 1:
            raise ModelLoadError(
                f"tensor {self.prefix}{name} is not one number", got=f"shape {list(shape)}", expected="one element"
            )
        return float(self._source.get(self.prefix + name, shape, torch.float32))

    def integers(self, name: str, *shape: int) -> torch.Tensor:
        """Return one tensor of integers, int64."""
        return self._source.get(self.prefix + name, shape, torch.int64).to(self.device)

    def weight(self, modules: Sequence[str], rows: Sequence[int], num_inputs: int) -> Weight:
        """Return the weights of linear layers of the same inputs as one product, one below the other.

        Args:
            modules: Their names, such as `gate_proj` and `up_proj`.
            rows: The outputs of each.
            num_inputs: K.
        """
        if len(modules) == 1:
            return Weight(self.tensor(f"{modules[0]}.weight", rows[0], num_inputs))
        return Weight(self.stacked([f"{module}.weight" for module in modules], rows, num_inputs))

    def stacked(self, names: Sequence[str], rows: Sequence[int], *columns: int) -> torch.Tensor:
        """Return tensors of `[rows[i], *columns]` one below the other: several weights in one product."""
        stacked = torch.empty(sum(rows), *columns, dtype=self._dtype, device=self.device)
        for part, name, count in zip(torch.split(stacked, list(rows)), names, rows, strict=True):
            part.copy_(self._source.get(self.prefix + name, (count, *columns), self._dtype))
        return stacked

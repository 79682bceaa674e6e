"""Reads weights from a `pytorch_model.bin`, as most published EAGLE heads have it, without running code in it."""

from __future__ import annotations

import pickle
from collections.abc import Collection
from functools import cached_property
from pathlib import Path

import torch

from raypp.errors import ModelLoadError
from raypp.models.weights import check_tensor, missing_tensor, type_name


class PickledWeights:
    """A file that `torch.save` wrote: a dict of tensors. Mapped, not read; see `raypp.models.weights.WeightSource`."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._read: set[str] = set()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor."""
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor `name`, which must be of `shape`, as `dtype`.

        Raises:
            ModelLoadError: missing, of another shape or kind, or in a file that is not one of tensors.
        """
        tensor = self._tensors.get(name)
        if tensor is None:
            raise missing_tensor(self._file, name, shape, self._tensors)
        self._read.add(name)
        check_tensor(self._file, name, (tuple(tensor.shape), type_name(tensor.dtype)), (shape, dtype))
        return tensor.to(dtype, copy=True)

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor, None if there is none of that name."""
        tensor = self._tensors.get(name)
        return None if tensor is None else tuple(tensor.shape)

    def type_of(self, name: str) -> torch.dtype | None:
        """Return the type of a tensor, None if there is none of that name."""
        tensor = self._tensors.get(name)
        return None if tensor is None else tensor.dtype

    def part(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, where: tuple[int | slice, ...]
    ) -> torch.Tensor:
        """Return the part of a tensor that is at an index."""
        return self.get(name, shape, dtype)[where]

    def unread(self) -> Collection[str]:
        """Return the names of the tensors that are there and that nobody asked for yet."""
        return self._tensors.keys() - self._read

    @cached_property
    def _tensors(self) -> dict[str, torch.Tensor]:
        try:
            found = torch.load(self._file, map_location="cpu", mmap=True, weights_only=True)
        except (RuntimeError, pickle.UnpicklingError, OSError, EOFError, ValueError) as error:
            raise ModelLoadError(
                f"{self._file} is not a file of tensors alone",
                got=f"{type(error).__name__}: {str(error).splitlines()[0]}",
                hint="convert it to safetensors",
            ) from error
        if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
            raise ModelLoadError(f"{self._file} is not a dict of tensors", got=type(found).__name__)
        return found

"""The tensors that captured batches read: allocated once, for the largest; a smaller batch has the front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from raypp.encoder.protocol import BatchShape, EncoderGraphConfig, Per, TensorSpec


class BatchBuffers:
    """The inputs of batches up to a shape.

    Args:
        config: What the inputs are.
        largest: The largest shape.
        device: Where they are.
    """

    def __init__(self, config: EncoderGraphConfig, largest: BatchShape, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._inputs = {
            spec.name: torch.zeros(self._extent(spec, largest), dtype=spec.dtype, device=device)
            for spec in config.inputs
        }
        self._staged: dict[str, torch.Tensor] = {}
        if device.type == "cuda":
            self._staged = {name: torch.empty_like(t, device="cpu").pin_memory() for name, t in self._inputs.items()}
            self._is_uploaded = torch.cuda.Event()

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._inputs.values())

    def inputs(self, shape: BatchShape) -> dict[str, torch.Tensor]:
        """Return the inputs of a batch of that shape, by name. Their addresses are always the same."""
        return {spec.name: self._inputs[spec.name][: self._extent(spec, shape)[0]] for spec in self._config.inputs}

    def upload(self, values: Mapping[str, torch.Tensor], shape: BatchShape) -> None:
        """Queue what the inputs are to hold; the values may be changed or freed at once.

        Args:
            values: By name, on the host; one that has fewer rows than its input leaves the rest as it is.
            shape: Of the batch.
        """
        inputs = self.inputs(shape)
        assert values.keys() == inputs.keys(), f"values {sorted(values)} for inputs {sorted(inputs)}"
        if self._staged:
            self._is_uploaded.synchronize()  # the batch before has left the staging memory
        for name, value in values.items():
            target, rows = inputs[name], len(value)
            assert value.dtype == target.dtype, f"{name} is {value.dtype}, not {target.dtype}"
            assert rows <= len(target), f"{name} has {rows} rows for {len(target)}"
            if self._staged:
                value = self._staged[name][:rows].copy_(value)
            target[:rows].copy_(value, non_blocking=True)
        if self._staged:
            self._is_uploaded.record()

    def _extent(self, spec: TensorSpec, shape: BatchShape) -> Sequence[int]:
        num_rows = {
            Per.TOKEN: shape.num_tokens,
            Per.PATCH: shape.num_tokens * self._config.patches_per_token,
            Per.ITEM: shape.max_items,
        }[spec.per]
        return (num_rows + spec.extra_rows, *spec.trailing)

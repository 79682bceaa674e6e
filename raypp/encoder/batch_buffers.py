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
        self._inputs = {
            spec.name: torch.zeros(self._extent(spec, largest), dtype=spec.dtype, device=device)
            for spec in config.inputs
        }

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._inputs.values())

    def inputs(self, shape: BatchShape) -> dict[str, torch.Tensor]:
        """Return the inputs of a batch of that shape, by name. Their addresses are always the same."""
        return {spec.name: self._inputs[spec.name][: self._extent(spec, shape)[0]] for spec in self._config.inputs}

    def upload(self, values: Mapping[str, torch.Tensor], shape: BatchShape) -> None:
        """Put into the inputs what they are to hold: queued from page-locked memory, at once from any other.

        Args:
            values: By name, on the host, never to change; they may be dropped. One that has fewer rows than its input
                leaves the rest as it is.
            shape: Of the batch.
        """
        inputs = self.inputs(shape)
        assert values.keys() == inputs.keys(), f"values {sorted(values)} for inputs {sorted(inputs)}"
        for name, value in values.items():
            target, rows = inputs[name], len(value)
            assert value.dtype == target.dtype, f"{name} is {value.dtype}, not {target.dtype}"
            assert rows <= len(target), f"{name} has {rows} rows for {len(target)}"
            target[:rows].copy_(value, non_blocking=True)

    def _extent(self, spec: TensorSpec, shape: BatchShape) -> Sequence[int]:
        num_rows = {
            Per.TOKEN: shape.num_tokens,
            Per.PATCH: shape.num_tokens * self._config.patches_per_token,
            Per.ITEM: shape.max_items,
        }[spec.per]
        return (num_rows + spec.extra_rows, *spec.trailing)

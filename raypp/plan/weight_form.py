"""The form of a model's linear layers: as the checkpoint stores them, or FP8 that is made when they are read.

A device that does not multiply a form holds it in the activations' type; plans count those bytes.
"""

from __future__ import annotations

from dataclasses import replace

from raypp.config.engine_config import EngineConfig
from raypp.errors import ConfigError
from raypp.models.config import ModelConfig
from raypp.models.quantization import ONLINE_FP8, Quantization
from raypp.plan.hardware import Hardware

_LEAST_BLOCK = 32
_TILE = 64


def with_weight_form(
    config: EngineConfig, model: ModelConfig, hardware: Hardware, *, device: str, dtype: str
) -> ModelConfig:
    """Return the model with its linear layers in the form that is asked for.

    Args:
        config: What is asked for.
        model: As its config.json has it.
        hardware: What the GPUs can.
        device: `cpu` or `cuda`.
        dtype: Of the activations.

    Raises:
        ConfigError: FP8 is asked for, and the checkpoint has fewer bits already, or the GPUs have no such type.
    """
    if config.model.quantization is None:
        return model
    if model.quantization is not None and model.quantization.bits != 8:
        raise ConfigError(
            "model.quantization asks for FP8, and the checkpoint's weights are in another form",
            got=f"quantization=fp8, weights of {model.quantization.bits} bits ({model.quantization.format})",
            expected="a checkpoint in 16 bits or in FP8",
            hint="leave quantization out: the checkpoint's own form is used",
        )
    if device == "cuda" and dtype != "float32" and _lacks_fp8(hardware):
        raise ConfigError(
            "the weights cannot be in 8 bits here",
            got=f"quantization=fp8, compute capability {'.'.join(map(str, hardware.gpu_capability))}",
            expected="GPUs of compute capability 8.9 or more",
            hint="leave quantization out",
        )
    return replace(model, quantization=ONLINE_FP8) if model.quantization is None else model


def held_model(model: ModelConfig, hardware: Hardware, *, device: str, dtype: str) -> ModelConfig:
    """Return the model with its linear layers in the form in which the device holds them.

    Args:
        model: With the form of `with_weight_form`.
        hardware: What the GPUs can; of unknown ones the best is assumed.
        device: `cpu` or `cuda`.
        dtype: Of the activations.
    """
    quantization = model.quantization
    if quantization is None:
        return model
    is_multiplied = device == "cuda" and dtype != "float32" and has_gpu_product(quantization)
    lacks_type = quantization.bits == 8 and _lacks_fp8(hardware)
    return model if is_multiplied and not lacks_type else replace(model, quantization=None)


def has_gpu_product(quantization: Quantization) -> bool:
    """Return whether a GPU multiplies a form as it is; `raypp.ops.cuda.quantized_projection` says it of a weight."""
    rows, columns = quantization.block
    if columns == 0:
        return True
    if quantization.bits == 4:
        return rows == 1 and (columns == _LEAST_BLOCK or columns % _TILE == 0)
    return columns >= _LEAST_BLOCK and columns & (columns - 1) == 0


def _lacks_fp8(hardware: Hardware) -> bool:
    return not hardware.has_fp8 and hardware.gpu_capability != (0, 0)

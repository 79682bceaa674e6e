"""The form of a model's linear layers: as the checkpoint stores them, or FP8 that is made when they are read."""

from __future__ import annotations

from dataclasses import replace

from raypp.config.engine_config import EngineConfig
from raypp.errors import ConfigError
from raypp.models.config import ModelConfig
from raypp.models.quantization import ONLINE_FP8


def with_weight_form(config: EngineConfig, model: ModelConfig) -> ModelConfig:
    """Return the model with its linear layers in the form that is asked for.

    Args:
        config: What is asked for.
        model: As its config.json has it.

    Raises:
        ConfigError: FP8 is asked for, and the checkpoint has fewer bits already.
    """
    if config.model.quantization is None:
        return model
    if model.quantization is None:
        return replace(model, quantization=ONLINE_FP8)
    if model.quantization.bits != 8:
        raise ConfigError(
            "model.quantization asks for FP8, and the checkpoint's weights are in another form",
            got=f"quantization=fp8, weights of {model.quantization.bits} bits ({model.quantization.format})",
            expected="a checkpoint in 16 bits or in FP8",
            hint="leave quantization out: the checkpoint's own form is used",
        )
    return model

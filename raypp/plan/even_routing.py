"""The setting `even_routing`: tokens spread over experts, for measurements with random weights."""

from __future__ import annotations

import logging
from dataclasses import replace

from raypp.config.engine_config import EngineConfig
from raypp.errors import ConfigError
from raypp.models.config import ModelConfig

_LOG = logging.getLogger(__name__)


def with_even_routing(config: EngineConfig, model: ModelConfig) -> ModelConfig:
    """Return the model whose tokens choose experts evenly, if that is asked for.

    Raises:
        ConfigError: it is asked for, and the model has no experts.
    """
    if not config.model.even_routing:
        return model
    if model.experts is None:
        raise ConfigError(
            "model.even_routing is for models with experts",
            got=f"even_routing=true, {model.architecture}, which is dense",
            expected="a mixture of experts",
            hint="leave even_routing out",
        )
    _LOG.warning("tokens choose their experts evenly, whatever the router says: texts are nonsense")
    return replace(model, experts=replace(model.experts, are_chosen_evenly=True))

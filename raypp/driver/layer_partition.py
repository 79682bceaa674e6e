"""How many layers each stage gets: as configured, or so that the slowest stage is as fast as possible."""

from __future__ import annotations

from raypp.config.engine import EngineConfig
from raypp.driver.cost_model import estimated_costs
from raypp.errors import ConfigError
from raypp.models.config import ModelConfig
from raypp.models.draft_head_config import DraftHeadConfig


def layers_per_stage(
    config: EngineConfig, model: ModelConfig, head: DraftHeadConfig | None, dtype_bytes: int, device: str
) -> list[int]:
    """Return the number of layers of each stage.

    Args:
        config: Of the engine.
        model: Its sizes.
        head: What drafts on the last stage; None: nothing does, or n-grams.
        dtype_bytes: Of a weight.
        device: Of the stages.

    Raises:
        ConfigError: what is configured does not add up to the model.
    """
    num_stages, explicit = config.parallel.num_stages, config.parallel.layer_partition
    if explicit is None:
        num_proposed = 0 if head is None else config.speculative.max_drafts
        costs = estimated_costs(
            model,
            dtype_bytes,
            on_gpu=device == "cuda",
            num_verified=config.speculative.usual_drafts,
            num_proposed=num_proposed,
            drafting_bytes=0 if head is None else head.drafting_bytes(num_proposed, dtype_bytes),
        )
        return costs.partition(model.num_layers, num_stages)
    if sum(explicit) != model.num_layers:
        raise ConfigError(
            "layer_partition does not add up to the model's layers",
            got=f"{explicit}, {sum(explicit)} layers",
            expected=f"{model.num_layers} layers",
        )
    return list(explicit)

"""How far the driver plans ahead of what it knows."""

from __future__ import annotations

from raypp.config.engine import EngineConfig
from raypp.driver.cost_model import estimated_costs
from raypp.models.config import ModelConfig
from raypp.scheduler.limits import STEPS_PER_COHORT

_SHORT_STEP_MS = 2.0
"""From a result to the plan that builds on it takes the hosts up to 1.1 ms: docs/design/0140-a-third-step-ahead.md."""


def max_steps_per_cohort(config: EngineConfig, model: ModelConfig, dtype_bytes: int, device: str) -> int:
    """Return how many steps of a cohort may be in flight at a time.

    With two, the hosts have as long as one takes, through all stages, to answer its result. Where that is short they
    get another one. It costs whoever comes then one such step; drafts would be chosen by older results.
    """
    if config.scheduler.max_steps_per_cohort is not None:
        return config.scheduler.max_steps_per_cohort
    if device != "cuda" or config.speculative.max_drafts:
        return STEPS_PER_COHORT
    [step_ms] = estimated_costs(model, dtype_bytes, on_gpu=True).of_stages([model.num_layers])
    return STEPS_PER_COHORT + (step_ms < _SHORT_STEP_MS)

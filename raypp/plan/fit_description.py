"""The answer of `raypp info`, as plain data."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from raypp.config.engine_config import EngineConfig
from raypp.errors import ConfigError
from raypp.plan.alternatives import alternatives, layers_by_memory, other_numbers_of_stages, summary_of
from raypp.plan.fit import check_fit
from raypp.plan.hardware import Hardware
from raypp.plan.machines import Machine, described_hardware


def describe_fit(config: EngineConfig, machines: tuple[Machine, ...] | None = None) -> dict[str, Any]:
    """Return whether an engine fits, its configuration and plan, and the hardware. Starts nothing.

    Args:
        config: Of the engine.
        machines: Described ones; None: this machine.

    Raises:
        ConfigError, ModelLoadError, ResourceError: it could run on no machine, or needs GPUs where there are none.
    """
    is_described = machines is not None
    if machines is None:
        hardware = Hardware.of_this_machine()
        if not os.environ.get("RAY_ADDRESS"):  # else Ray may find GPUs elsewhere
            machines = (Machine(hardware.num_gpus, hardware.gpu_memory_bytes),)
    else:
        if config.parallel.device == "cpu":
            raise ConfigError("--gpus describes GPUs, and device=cpu uses none", got="both", expected="one of them")
        hardware = described_hardware(machines)
    fit = check_fit(config, hardware, machines)
    by_memory = layers_by_memory(fit) if fit.plan else None
    resolved = config if fit.plan is None else fit.plan.resolved_config()
    return {
        "config": resolved.model_dump(mode="json"),
        "plan": None if fit.plan is None else fit.plan.describe(),
        "hardware": asdict(hardware),
        "fit": fit.describe()
        | {
            "is_described": is_described,
            "alternatives": [] if fit.plan else [each.describe() for each in alternatives(fit)],
            "layers_by_memory": None if by_memory is None else by_memory.describe(),
            "other_numbers_of_stages": [
                {"num_stages": len(other.layout.layers), "fits": other.plan is not None, **summary_of(other)}
                for other in other_numbers_of_stages(fit)
            ],
        },
    }

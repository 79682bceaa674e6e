"""What the environment of an engine's actors has beside their node's."""

from __future__ import annotations

from typing import Any

from raypp.config.env import passed_on

_SEES_ALL_GPUS = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
"""For actors that map the memory of their neighbours' GPUs."""


def actor_environment(*, sees_all_gpus: bool = False) -> dict[str, Any]:
    """Return options of an actor; none where nothing is set, so that a process that Ray keeps ready can be used."""
    variables = passed_on() | (_SEES_ALL_GPUS if sees_all_gpus else {})
    return {"runtime_env": {"env_vars": variables}} if variables else {}

"""What the environment of an engine's actors has beside their node's."""

from __future__ import annotations

from typing import Any

from raypp.config.env import passed_on

_ON_GPU = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "RAY_worker_niceness": "0"}
"""For actors on GPUs: they map the memory of their neighbours' GPUs, and run at the priority of other processes (15 is
what a cluster gives them; a Ray of raypp's own gives all actors 0)."""


def actor_environment(*, on_gpu: bool = False) -> dict[str, Any]:
    """Return options of an actor; none where nothing is set, so that a process that Ray keeps ready can be used."""
    variables = passed_on() | (_ON_GPU if on_gpu else {})
    return {"runtime_env": {"env_vars": variables}} if variables else {}

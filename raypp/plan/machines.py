"""GPUs that are described, so that an engine can be planned for machines that are not here: `4x80GB`.

A described GPU has as many bytes as its name says in decimal gigabytes. Cards have up to 7 % more: one sold with 24 GB
has 24.1 to 25.8 billion bytes. So a plan for a description leaves some memory over, and never promises too much.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from raypp.config.sections import Placement
from raypp.errors import ConfigError
from raypp.plan.hardware import Hardware

_MACHINE = re.compile(r"(\d+)\s*x\s*(\d+(?:\.\d+)?)\s*(GB|GiB)", re.IGNORECASE)
_UNITS = {"gb": 10**9, "gib": 1 << 30}
_MAX_GPUS = 1024
_MIN_BYTES, _MAX_BYTES = 10**9, 10**12
_EXPECTED = "NUMBERxMEMORY, e.g. 4x80GB or 2x22.5GiB; for several machines joined by +, e.g. 2x24GB+2x24GB"
_CAPABILITY = (8, 9)
"""Assumed: from it on a draft head keeps weights in 8 bits besides, so that the plan counts them."""
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Machine:
    """The GPUs of one machine, all alike."""

    num_gpus: int
    gpu_memory_bytes: int


def read_machines(text: str) -> tuple[Machine, ...]:
    """Return the machines that a text like `4x80GB` or `2x24GB+2x24GB` describes.

    Raises:
        ConfigError: it has another form, or numbers that no machine has.
    """
    machines = []
    for part in text.split("+"):
        match = _MACHINE.fullmatch(part.strip())
        if match is None:
            raise ConfigError("--gpus does not describe GPUs", got=text, expected=_EXPECTED)
        num_gpus, memory_bytes = int(match[1]), int(float(match[2]) * _UNITS[match[3].lower()])
        if not 1 <= num_gpus <= _MAX_GPUS:
            raise ConfigError("--gpus: no machine has so many GPUs", got=part, expected=f"1 to {_MAX_GPUS} GPUs")
        if not _MIN_BYTES <= memory_bytes <= _MAX_BYTES:
            raise ConfigError("--gpus: no GPU has so much memory", got=part, expected="1 GB to 1000 GB per GPU")
        machines.append(Machine(num_gpus, memory_bytes))
    return tuple(machines)


def described_hardware(machines: Sequence[Machine]) -> Hardware:
    """Return the hardware to plan for: all GPUs, each with the memory of the smallest.

    Cores and main memory are not described; plans for GPUs do not depend on them.
    """
    return Hardware(
        num_cpu_cores=1,
        num_gpus=sum(machine.num_gpus for machine in machines),
        gpu_name="as described",
        gpu_memory_bytes=min(machine.gpu_memory_bytes for machine in machines),
        gpu_capability=_CAPABILITY,
    )


def num_machines_for(shares: Sequence[float], machines: Sequence[Machine], strategy: Placement) -> int | None:
    """Return over how many machines these stages and encoders are spread; None when there is no room for them.

    Args:
        shares: The share of a GPU that each asks for, above 0 and at most 1.
        machines: Whose GPUs nobody else uses.
        strategy: See `ParallelSection.placement`.
    """
    if strategy == "strict_spread":
        return len(shares) if len(shares) <= len(machines) else None
    if strategy != "spread" and any(_num_used(shares, [machine]) for machine in machines):
        return 1
    used = None if strategy == "strict_pack" else _num_used(shares, machines)
    return min(len(shares), len(machines)) if used and strategy == "spread" else used


def _num_used(shares: Sequence[float], machines: Sequence[Machine]) -> int | None:
    """Return over how many machines the shares lie if the largest are placed first; None: they find no room."""
    free = [[1.0] * machine.num_gpus for machine in machines]
    used = set()
    for share in sorted(shares, reverse=True):
        place = next(
            (
                (machine, gpu)
                for machine, gpus in enumerate(free)
                for gpu, left in enumerate(gpus)
                if left + _ROUNDING >= share
            ),
            None,
        )
        if place is None:
            return None
        free[place[0]][place[1]] -= share
        used.add(place[0])
    return len(used)

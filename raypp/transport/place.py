"""Where a stage runs, as far as it decides which links can join it to another."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class StagePlace:
    """A stage's process and device."""

    node: str
    """The same for all processes that can share memory and sockets: one boot of one machine, one network namespace."""
    process: str
    """The same for all stages of one process."""
    gpu: str | None
    """The GPU's UUID; None on a CPU."""
    reachable_gpus: tuple[str, ...] = ()
    """The GPUs whose memory this stage's GPU can use, as far as the process sees them; its own included."""

    @classmethod
    def here(cls, device: torch.device) -> StagePlace:
        """Return the place of this process and a device."""
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        node = f"{boot_id}/{os.stat('/proc/self/ns/net').st_ino}"
        process = f"{os.stat('/proc/self/ns/pid').st_ino}/{os.getpid()}"
        if device.type != "cuda":
            return cls(node, process, None)
        own = device.index if device.index is not None else torch.cuda.current_device()
        reachable = tuple(
            _uuid(index)
            for index in range(torch.cuda.device_count())
            if index == own or torch.cuda.can_device_access_peer(own, index)
        )
        return cls(node, process, _uuid(own), reachable)

    def to_json(self) -> str:
        """Return the place as text that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> StagePlace:
        """Return the place that `to_json` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "reachable_gpus": tuple(fields["reachable_gpus"])})


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)

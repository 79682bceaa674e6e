"""Which link joins two stages, by where they run: the one that the configuration names, or the fastest possible.

    auto:  ipc   on one node, when each GPU reaches the other's memory, or both stages share a GPU
           nccl  between nodes, and between GPUs that do not reach each other
           gloo  on CPUs, and wherever else neither is possible

These are pure functions of the two places: both ends come to the same answer, or to the same error.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from raypp.config.sections import LinkKind, TransportKind
from raypp.errors import ConfigError
from raypp.transport.edges import Edge


@dataclass(frozen=True)
class StagePlace:
    """Where a stage runs, as far as it decides which links can join it to another."""

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
        has_peers = os.environ.get("NCCL_P2P_DISABLE") != "1"  # NCCL's word for machines where it does not work
        reachable = tuple(
            _uuid(index)
            for index in range(torch.cuda.device_count())
            if index == own or (has_peers and torch.cuda.can_device_access_peer(own, index))
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


def resolve_link(asked: TransportKind, edge: Edge, sender: StagePlace, receiver: StagePlace) -> LinkKind:
    """Return the link of one edge.

    Args:
        asked: What the configuration says.
        edge: The edge, for its name.
        sender: Where its sending stage is.
        receiver: Where its receiving stage is.

    Raises:
        ConfigError: the link that was asked for cannot join the two.
    """
    if asked == "auto":
        if ipc_obstacle(sender, receiver) is None:
            return "ipc"
        return "nccl" if nccl_obstacle(sender, receiver) is None else "gloo"
    obstacle = None
    if asked == "local":
        obstacle = "two stages, and no process to share"
    elif asked == "ipc":
        obstacle = ipc_obstacle(sender, receiver)
    elif asked == "nccl":
        obstacle = nccl_obstacle(sender, receiver)
    if obstacle is None:
        return asked
    raise ConfigError(
        f"{asked} links cannot join stage {edge.sender} and stage {edge.receiver}",
        got=obstacle,
        hint="transport=auto takes the best that can",
    )


def ipc_obstacle(sender: StagePlace, receiver: StagePlace) -> str | None:
    """Return why two stages cannot write into each other's GPU memory; None when they can."""
    if sender.gpu is None or receiver.gpu is None:
        return "a stage without a GPU"
    if sender.node != receiver.node:
        return "two nodes, or two network namespaces of one"
    if sender.process == receiver.process:
        return "two stages in one process, where CUDA cannot map what the process already has"
    for one, other in ((sender, receiver), (receiver, sender)):
        if other.gpu not in one.reachable_gpus:
            return f"GPU {one.gpu} does not reach GPU {other.gpu}, or its process does not see it"
    return None


def nccl_obstacle(sender: StagePlace, receiver: StagePlace) -> str | None:
    """Return why NCCL cannot join two stages; None when it can."""
    if sender.gpu is None or receiver.gpu is None:
        return "a stage without a GPU"
    if sender.gpu == receiver.gpu:
        return f"both stages on GPU {sender.gpu}, and NCCL refuses two ranks on one GPU"
    return None


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)

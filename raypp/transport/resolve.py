"""Which link joins two stages: what was asked for, if it can, or the best that can.

    auto:  ipc   on one node, when each GPU reaches the other's memory, or both stages share a GPU
           nccl  between nodes, and between GPUs that do not reach each other
           gloo  on CPUs, and wherever else nothing better can

Pure functions of the two places: both ends come to the same answer, or to the same error.
"""

from __future__ import annotations

from raypp.config.sections import LinkKind, TransportKind
from raypp.errors import ConfigError
from raypp.transport.edges import Edge
from raypp.transport.place import StagePlace


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
        hint="transport='auto' takes the best that can",
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

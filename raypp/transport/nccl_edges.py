"""All `nccl` edges of one stage: opened in one order by all stages, and left all at once."""

from __future__ import annotations

import logging
import time

import torch

from raypp.transport.closing import after_last
from raypp.transport.edges import Edge, EdgeEnds
from raypp.transport.nccl import NcclReceiver, NcclSender
from raypp.transport.nccl_channel import NcclChannel
from raypp.transport.rendezvous import Meeting

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 5.0


class NcclEdges:
    """A stage's ends.

    Args:
        stage_index: Of this stage.
        edges: Those that have an end here, in the order in which all stages open theirs.
        device: Of this stage, with an index. It becomes the current one.
        meeting: Where the stages meet; the constructor waits for the peers.

    Raises:
        ConfigError, DeadlineError, ResourceError: as `NcclChannel`.
    """

    def __init__(self, stage_index: int, edges: list[Edge], device: torch.device, meeting: Meeting) -> None:
        self._stage_index = stage_index
        self._channels: list[NcclChannel] = []
        self.ends = EdgeEnds()
        """The ends by the names of their edges. The communicators end with the last of them."""
        on_close = after_last(len(edges), self.close)
        torch.cuda.set_device(device)
        try:
            for edge in edges:
                slots = torch.zeros(edge.num_slots, edge.slot_bytes, dtype=torch.uint8, device=device)
                torch.cuda.synchronize(device)  # the edge's stream does not wait for the zeros
                channel = NcclChannel(edge, stage_index, device, meeting)
                self._channels.append(channel)
                channel.warm_up(slots[0], meeting.remaining_s)
                if stage_index == edge.sender:
                    self.ends.senders[edge.name] = NcclSender(channel, slots, on_close)
                else:
                    self.ends.receivers[edge.name] = NcclReceiver(channel, slots, on_close)
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """End all transfers."""
        for channel in self._channels:
            channel.abort()

    def close(self) -> None:
        """Leave all communicators, once what was enqueued is done; give up after five seconds.

        All at once, because leaving one waits for its peer: stages that left theirs one after the other, each in its
        own order, would wait for each other.
        """
        ends = time.monotonic() + _CLOSE_TIMEOUT_S
        leaving = []
        for channel in self._channels:
            if channel.is_done_within(max(ends - time.monotonic(), 0.0)):
                leaving.append(channel.leave())
            else:
                logger.warning("stage %d closes a link with transfers in progress", self._stage_index)
                channel.abort()
        for call in leaving:
            try:
                if call is not None:
                    call.result(max(ends - time.monotonic(), 0.1))
            except TimeoutError as error:
                logger.warning("a neighbour of stage %d did not leave: %s", self._stage_index, error)

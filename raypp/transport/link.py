"""The contract of a stage link: the two ends of a directed edge, and how a step sends its bytes over it.

An edge has a ring of slots; a step uses slot `step_id % num_slots` on both ends. Both ends know a message's size from
the step plan; it does not travel. Every step sends exactly one message on every edge, in step order.

    sender:   buffer = acquire(step_id);  write into it;  send(step_id, num_bytes)
    receiver: post_recv(step_id, num_bytes);  buffer = wait(step_id);  read from it;  release(step_id)

`send` never waits for the receiver. `acquire` waits, with a deadline, until the slot's previous message is out.
`post_recv` says that the message will be wanted: it may be called long before the sender sends, or after.
Links between host memories wait on the host. They raise DeadlineError when a wait runs out, StageDiedError when the
peer is gone.

Links between GPUs (`ipc`, `nccl`) never wait on the host: their operations go to the current CUDA stream and return at
once, and "waits" below means that the stream does. A stage uses all its ends under one stream. These waits have no
deadline: the driver sees that steps do not finish, `abort` ends the stream's waits, and a stage that had to abort ends
its process by `os._exit`. On any link an end that was aborted raises EngineDeadError when it is used.
"""

from __future__ import annotations

from typing import Protocol

import torch


class LinkSender(Protocol):
    """The sending end of an edge."""

    @property
    def slots(self) -> torch.Tensor:
        """All slots, uint8 [num_slots, slot_bytes]. Step s uses slot `s % num_slots`; their addresses never change."""

    def acquire(self, step_id: int) -> torch.Tensor:
        """Return the step's slot, uint8 [slot_bytes], free to be overwritten."""

    def send(self, step_id: int, num_bytes: int) -> None:
        """Send the first `num_bytes` of the step's slot. Does not wait for the receiver."""

    def abort(self) -> None:
        """Give up at once, from any thread: waits in progress end with an error. The edge cannot be used again."""

    def close(self) -> None:
        """Release everything, once the messages that were sent are out."""


class LinkReceiver(Protocol):
    """The receiving end of an edge."""

    @property
    def slots(self) -> torch.Tensor:
        """All slots, uint8 [num_slots, slot_bytes]. Step s uses slot `s % num_slots`; their addresses never change."""

    def post_recv(self, step_id: int, num_bytes: int) -> None:
        """Say that the step's message, of `num_bytes`, will be wanted. From any one thread."""

    def wait(self, step_id: int) -> torch.Tensor:
        """Return the step's slot, uint8 [slot_bytes], once its message is there."""

    def release(self, step_id: int) -> None:
        """Give the slot back: what was wanted from it has been read."""

    def abort(self) -> None:
        """Give up at once, from any thread: waits in progress end with an error. The edge cannot be used again."""

    def close(self) -> None:
        """Release everything."""

"""An edge inside one process, whose ends share the slots: the `local` link. Nothing is copied.

It joins a single stage to itself, for feedback, and stages that live in one process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from raypp.errors import DeadlineError, EngineDeadError
from raypp.messages import NO_STEP

_CPU = torch.device("cpu")


class _Ring:
    """The slots of one edge, and which step's message each holds."""

    def __init__(self, num_slots: int, slot_bytes: int, deadline_s: float, device: torch.device) -> None:
        assert num_slots >= 2, "one slot cannot be written while it is read"
        self.all_slots = torch.zeros(num_slots, slot_bytes, dtype=torch.uint8, device=device)
        self.slots = self.all_slots.unbind()
        self.steps = [NO_STEP] * num_slots
        self.sizes = [0] * num_slots
        self.changed = threading.Condition()
        self._deadline_s = deadline_s
        self._aborted = False
        self._closed = False

    def await_until(self, there: Callable[[], bool], what: str) -> None:
        """Wait until `there()`; the caller holds `changed`."""
        self.changed.wait_for(lambda: self._aborted or self._closed or there(), self._deadline_s)
        if self._aborted:
            raise EngineDeadError(f"the local link was aborted while it waited for {what}")
        if there():
            return
        if self._closed:
            raise EngineDeadError(f"the local link was closed while it waited for {what}")
        raise DeadlineError(
            f"timed out waiting for {what}",
            got=f"nothing within {self._deadline_s} s",
            hint=None if self._deadline_s else "one thread holds both ends: what is not there yet can never come",
        )

    def abort(self) -> None:
        with self.changed:
            self._aborted = True
            self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            self._closed = True
            self.changed.notify_all()


class _LocalEnd:
    """What both ends do alike."""

    def __init__(self, ring: _Ring) -> None:
        self._ring = ring

    @property
    def slots(self) -> torch.Tensor:
        """All slots, uint8 [num_slots, slot_bytes]."""
        return self._ring.all_slots

    def abort(self) -> None:
        """End waits in progress on both ends with an error."""
        self._ring.abort()

    def close(self) -> None:
        """Use the edge no more. What was sent can still be received."""
        self._ring.close()


class LocalSender(_LocalEnd):
    """The sending end; see `LinkSender`."""

    def acquire(self, step_id: int) -> torch.Tensor:
        """Return the step's slot, uint8 [slot_bytes], once the receiver has released its previous message."""
        ring, slot = self._ring, step_id % len(self._ring.slots)
        with ring.changed:
            ring.await_until(lambda: ring.steps[slot] == NO_STEP, f"the release of step {step_id - len(ring.slots)}")
        return ring.slots[slot]

    def send(self, step_id: int, num_bytes: int) -> None:
        """Make the step's slot readable. Copies nothing."""
        ring, slot = self._ring, step_id % len(self._ring.slots)
        with ring.changed:
            assert ring.steps[slot] == NO_STEP, f"step {step_id} was sent without having been acquired"
            ring.steps[slot], ring.sizes[slot] = step_id, num_bytes
            ring.changed.notify_all()


class LocalReceiver(_LocalEnd):
    """The receiving end; see `LinkReceiver`."""

    def __init__(self, ring: _Ring) -> None:
        super().__init__(ring)
        self._wanted: dict[int, int] = {}  # step_id -> num_bytes

    def post_recv(self, step_id: int, num_bytes: int) -> None:
        """Note what the plan says about the message's size."""
        assert step_id not in self._wanted, f"step {step_id} was posted twice"
        self._wanted[step_id] = num_bytes

    def wait(self, step_id: int) -> torch.Tensor:
        """Return the step's slot, uint8 [slot_bytes], once its message is there."""
        ring, slot = self._ring, step_id % len(self._ring.slots)
        wanted = self._wanted.get(step_id)
        assert wanted is not None, f"step {step_id} was never posted"
        with ring.changed:
            ring.await_until(lambda: ring.steps[slot] == step_id, f"the message of step {step_id}")
            assert ring.sizes[slot] == wanted, f"step {step_id}: sent {ring.sizes[slot]} bytes, wanted {wanted}"
        return ring.slots[slot]

    def release(self, step_id: int) -> None:
        """Give the step's slot back to the sender."""
        ring, slot = self._ring, step_id % len(self._ring.slots)
        with ring.changed:
            assert ring.steps[slot] == step_id, f"step {step_id} was released but never received"
            ring.steps[slot] = NO_STEP
            del self._wanted[step_id]
            ring.changed.notify_all()


def open_local_edge(
    num_slots: int, slot_bytes: int, deadline_s: float = 0.0, *, device: torch.device = _CPU
) -> tuple[LocalSender, LocalReceiver]:
    """Return the two ends of an edge inside this process.

    Args:
        num_slots: Steps that may be on the edge at once, at least 2.
        slot_bytes: The largest message, bytes.
        deadline_s: How long either end waits for the other. 0 is for one thread that holds both ends: what is not there
            when it asks can never come, so it gets the error at once.
        device: Where the slots are. On a GPU both ends must use one stream, whose order replaces waits.
    """
    ring = _Ring(num_slots, slot_bytes, deadline_s, device)
    return LocalSender(ring), LocalReceiver(ring)

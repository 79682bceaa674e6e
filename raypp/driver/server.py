"""The driver's loop around the engine: clients on one side, stages on the other, and whatever goes wrong.

One thread owns every socket. Other threads reach it only through `stop` and `fail`, which wake it.

One turn of the loop does a bounded part of what clients ask for: a message may hold many requests, and the steps of
those that run must not wait for it. The rest of a message is done in the next turns, before the next message. While no
step is in flight nothing waits, and a message is taken in as a whole.

A client that vanishes without a word is noticed by zmq, whose ROUTER then refuses what is sent to it: at the next
output, or at the next heartbeat. Its requests are aborted.
"""

from __future__ import annotations

import errno
import gc
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import zmq

from raypp.client_messages import (
    AbortRequests,
    AddRequests,
    Alive,
    ClientMessage,
    CloseClient,
    DriverMessage,
    EngineDead,
    OpenClient,
    Rejected,
    StatsCall,
    StatsReply,
    decode_client_message,
    encode_driver_message,
)
from raypp.driver.engine_loop import ChannelPipeline, DraftLog, Engine
from raypp.driver.outbox import Outbox
from raypp.driver.stage_health import BLAME_S, FailureReports, StageHealth, Witness
from raypp.errors import QueueFullError, RayppError, RequestError
from raypp.prompt_items import EncoderItem
from raypp.request import Request, RequestMemory, RequestUpdate
from raypp.types import FinishReason

_SMALL_ARRAY_BYTES = 1 << 14
"""A smaller array is copied from its message: it may be a corner of a buffer of zmq, and would keep that in memory."""


class OpenRequests:
    """The unfinished requests of all clients, by client and id, and a limit to the memory that they take.

    Pixels stay until the request ends, for it may be preempted, and its images then be encoded once more. An image that
    several requests bring is kept once. A request that an engine before this one has begun was admitted there: it is
    counted, and not refused because others were here first. Output tokens are not counted: only requests that have had
    a row have any.

    Args:
        max_bytes: What prompts and requests may take; see `RequestMemory`.
        max_pixel_bytes: What their images may.
    """

    def __init__(self, *, max_bytes: int, max_pixel_bytes: int) -> None:
        self.memory = RequestMemory(max_bytes=max_bytes, max_pixel_bytes=max_pixel_bytes)
        """Counts the requests until they are removed, those of clients that left among them."""
        self.of_client: dict[bytes, dict[str, Request]] = {}
        """By id, of each client that is there."""

    def find(self, client: bytes, request_id: str) -> Request | None:
        """Return a client's unfinished request; None if there is none of this id."""
        return self.of_client.get(client, {}).get(request_id)

    def admit(self, request: Request) -> None:
        """Count a new request. Its images become those that are kept already, where they are the same.

        Raises:
            QueueFullError: there is no room for it now, and no engine has begun it.
            RequestError: there never is, or the client has an unfinished one of the same id.
        """
        if self.find(request.client, request.request_id) is not None:
            raise RequestError(
                "a request with this id is unfinished",
                request_id=request.request_id,
                got=request.request_id,
                expected="an id of its own",
            )
        if request.items is not None:
            request.items = replace(request.items, items=tuple(map(_without_buffer, request.items.items)))
        request.items = self.memory.add(request, request, is_new=not request.num_earlier_tokens)
        self.of_client.setdefault(request.client, {})[request.request_id] = request

    def remove(self, request: Request) -> None:
        """Forget a request that has ended; one that was refused, or forgotten already, is ignored."""
        if self.memory.remove(request):
            of_client = self.of_client.get(request.client, {})
            if of_client.get(request.request_id) is request:
                del of_client[request.request_id]


def _without_buffer(item: EncoderItem) -> EncoderItem:
    if item.patches.nbytes >= _SMALL_ARRAY_BYTES:
        return item
    return replace(item, patches=np.array(item.patches))


_COST_PER_TURN = 12.0
"""What one turn does for clients while steps are in flight: 1 for a message, for a request that comes, for one that is
aborted."""

_TOKENS_PER_COST = 16_384
"""Tokens that take as long to copy as a request takes otherwise."""

_UNTAKEN_MESSAGES = 1 << 16

logger = logging.getLogger(__name__)


def spare_the_collector() -> None:
    """Keep Python's collector from looking through all that waits, 50 ms for 10,000 requests, between two steps.

    For a process that does nothing but `serve`, before it does. Requests are in no cycles; young objects are still
    looked through, and old ones after some millions of new ones.
    """
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, 1000)


def open_client_socket(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """Return a ROUTER for clients, bound to `address`.

    A slow client loses nothing: `_UNTAKEN_MESSAGES` wait for it, minutes of output. One that takes nothing for longer
    counts as gone.
    """
    clients = context.socket(zmq.ROUTER)
    clients.linger = 1000
    clients.sndhwm = _UNTAKEN_MESSAGES
    clients.rcvhwm = 0
    clients.router_mandatory = True  # say when a client is gone
    clients.bind(address)
    return clients


class DriverServer:
    """Serves clients until `stop`, or until the pipeline fails."""

    def __init__(
        self,
        engine: Engine,
        pipeline: ChannelPipeline,
        clients: zmq.Socket[bytes],
        health: StageHealth,
        failures: FailureReports,
        requests: OpenRequests,
        *,
        heartbeat_s: float,
        on_connected: Callable[[], None] = lambda: None,
    ) -> None:
        """Take over the sockets.

        Args:
            engine: What the requests go to.
            pipeline: The engine's pipeline, for its socket and its heartbeats.
            clients: Of `open_client_socket`.
            health: What the pipeline hears of the stages.
            failures: What the pipeline, and others through `fail`, report.
            requests: Keeps the unfinished ones; empty.
            heartbeat_s: How often stages and clients get a heartbeat.
            on_connected: Called when a client has connected.
        """
        self._engine = engine
        self._pipeline = pipeline
        self._clients = clients
        self._health = health
        self._failures = failures
        self._heartbeat_s = heartbeat_s
        self._on_connected = on_connected
        self._outbox = Outbox(self._send)
        self._draft_log = DraftLog()
        self._requests = requests
        self._work: deque[Iterator[float]] = deque()  # begun for clients; each yields what its last piece has cost
        self._aborted: list[RequestUpdate] = []  # what clients are still to be told
        self._gone: set[bytes] = set()  # clients to be forgotten
        self._wakeup_out, self._wakeup_in = socket.socketpair()
        self._wakeup_in.setblocking(False)
        self._next_heartbeat_s = 0.0
        self._stopping = False
        self._poller = zmq.Poller()
        self._grammars = engine.fileno()
        for source in (clients, pipeline.socket, self._wakeup_out, self._grammars):
            if source is not None:
                self._poller.register(source, zmq.POLLIN)

    def stop(self) -> None:
        """Make `serve` return soon. From any thread."""
        self._stopping = True
        self.wake()

    def fail(self, error: RayppError, witness: Witness) -> None:
        """Make `serve` tell the clients, and raise, once it is clear which error is the cause. From any thread."""
        self._failures.add(error, witness)
        self.wake()

    def serve(self) -> None:
        """Run until `stop`.

        Raises:
            EngineDeadError, StageDiedError: the pipeline failed; the clients have been told.
        """
        try:
            while not self._stopping:
                self.turn()
        except RayppError as error:
            self._tell_of_death(error)
            raise

    def turn(self) -> None:
        """Wait until something has happened, and do a bounded part of what is to be done."""
        ready = dict(self._poller.poll(0 if self._work else self._poll_ms()))
        if ready and ready.keys() <= {self._grammars} and not self._work and not self._engine.relay_masks():
            return  # every step brings masks; the rest of the turn is for when a result has come
        if self._wakeup_out.fileno() in ready:
            self._wakeup_out.recv(4096)
        if self._clients in ready or self._work:
            self._work_for_clients()
        self._engine.step()
        self._send_outputs()
        self._send_failures()
        self._check_health()
        self._forget_gone_clients()

    def close(self) -> None:
        """Close the sockets that wake the loop, and what the engine has started."""
        self._engine.close()
        self._wakeup_in.close()
        self._wakeup_out.close()

    def wake(self) -> None:
        """Make `serve` look for what has changed. From any thread."""
        try:
            self._wakeup_in.send(b"!")
        except OSError:
            return  # it is full of wake-ups already, or the loop has ended

    def _poll_ms(self) -> int:
        wait_s = BLAME_S / 10 if self._failures.best is not None else self._heartbeat_s
        return max(round(wait_s * 1e3), 1)

    def _check_health(self) -> None:
        frozen = self._health.check(is_busy=self._engine.is_busy)
        if frozen is not None:
            self._failures.add(frozen, Witness.DEATH)
        if (error := self._failures.verdict()) is not None:
            raise error
        if time.monotonic() >= self._next_heartbeat_s:
            self._pipeline.send_heartbeat()
            for client in list(self._requests.of_client):
                self._send(client, Alive())
            self._next_heartbeat_s = time.monotonic() + self._heartbeat_s
            self._draft_log.note(self._engine.stats(), time.monotonic())

    def _work_for_clients(self) -> None:
        """Do a part of what clients ask for; what is left keeps the poller from waiting.

        While no step would be kept waiting, what was begun is ended: a message's requests share their first steps, and
        these do not depend on how many of them fit into a turn.
        """
        room = _COST_PER_TURN
        while room > 0 or (self._work and not self._engine.is_busy):
            if self._work:
                cost = next(self._work[0], None)
                if cost is None:
                    self._work.popleft()
                    continue
                room -= cost
            else:
                try:
                    # Images are large: they stay where zmq put them.
                    client, *frames = self._clients.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    return
                message = decode_client_message([frame.buffer for frame in frames])
                self._work.append(self._handle(client.bytes, message))
                room -= 1

    def _handle(self, client: bytes, message: ClientMessage) -> Iterator[float]:
        """Do what a message asks for, piece by piece; yield what each has cost."""
        match message:
            case OpenClient():
                self._requests.of_client.setdefault(client, {})
                self._on_connected()
            case AddRequests(requests):
                for request in requests:
                    self._add(client, request)
                    num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
                    yield 1 + num_tokens / _TOKENS_PER_COST
            case AbortRequests(request_ids):
                for request_id in request_ids:
                    found = self._requests.find(client, request_id)
                    if found is not None and self._engine.abort(found):
                        self._requests.remove(found)
                        self._aborted.append(RequestUpdate(found, [], FinishReason.ABORT))
                    yield 1
            case StatsCall(call_id, spans_after_us):
                self._send(client, StatsReply(call_id, self._stats(spans_after_us)))
            case CloseClient():
                yield from self._abort_all(self._close(client))

    def _add(self, client: bytes, request: Request) -> None:
        request.client = client
        try:
            self._requests.admit(request)
            self._engine.add(request)
        except (QueueFullError, RequestError) as error:
            self._requests.remove(request)
            self._send(client, Rejected(request.handle, error))

    def _send_outputs(self) -> None:
        aborted, self._aborted = self._aborted, []
        updates = [*aborted, *self._engine.take_updates()]
        for update in updates:
            if update.finish_reason:
                self._requests.remove(update.request)
        if self._work:  # maybe for a client that has left
            updates = [update for update in updates if update.request.client in self._requests.of_client]
        self._outbox.put(updates)

    def _send_failures(self) -> None:
        failed = self._engine.take_failed()
        if failed:
            self._outbox.flush()  # an error is the last that a client hears of a request
        for request, error in failed:
            self._requests.remove(request)
            if request.client in self._requests.of_client:
                self._send(request.client, Rejected(request.handle, error))

    def _stats(self, spans_after_us: int | None) -> dict[str, Any]:
        activity = self._pipeline.activity
        stats = self._engine.stats_dict() | {
            "stage_silent_s": self._health.silent_s(),
            "active_s": activity.active_s,
            "stages": activity.sums(),
        }
        if spans_after_us is not None:
            stats["spans"] = activity.spans_after(spans_after_us)
        return stats

    def _close(self, client: bytes) -> list[Request]:
        """Tell a client nothing more; return what it still has."""
        self._outbox.forget(client)
        return list(self._requests.of_client.pop(client, {}).values())

    def _abort_all(self, requests: Sequence[Request]) -> Iterator[float]:
        for request in requests:
            if not request.finish_reason:
                self._engine.abort(request)
                self._requests.remove(request)
                yield 1

    def _forget_gone_clients(self) -> None:
        for client in self._gone:
            requests = self._close(client)
            logger.warning("a client disconnected; its %d requests are aborted", len(requests))
            self._work.append(self._abort_all(requests))
        self._gone.clear()

    def _tell_of_death(self, error: RayppError) -> None:
        """Send clients what there is for them, and then why nothing more will come."""
        self._send_outputs()
        self._outbox.flush()
        self._send_failures()
        in_flight: dict[bytes, list[int]] = {}
        for request in self._engine.requests_in_flight():
            in_flight.setdefault(request.client, []).append(request.handle)
        for client in list(self._requests.of_client):
            self._send(client, EngineDead(error, in_flight.get(client, [])))

    def _send(self, client: bytes, message: DriverMessage) -> None:
        try:
            self._clients.send_multipart([client, *encode_driver_message(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EHOSTUNREACH, errno.EAGAIN):
                raise
            self._gone.add(client)  # its connection has ended, or it takes nothing any more

"""The driver's loop around the engine: clients on one side, stages on the other, and whatever goes wrong.

One thread owns every socket. Other threads reach it only through `stop` and `fail`, which wake it.

A client that vanishes without a word is noticed by zmq, whose ROUTER then refuses what is sent to it: at the next
output, or at the next heartbeat. Its requests are aborted.
"""

from __future__ import annotations

import errno
import logging
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from raypp.client_messages import (
    AbortRequests,
    AddRequest,
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
from raypp.driver.channel_pipeline import ChannelPipeline
from raypp.driver.draft_log import DraftLog
from raypp.driver.engine import Engine
from raypp.driver.failure_reports import BLAME_S, FailureReports, Witness
from raypp.driver.outbox import Outbox
from raypp.driver.stage_health import StageHealth
from raypp.errors import RayppError, RequestError
from raypp.scheduler.request import Request, RequestUpdate

_MESSAGES_PER_TURN = 4  # a long list of requests must not hold up the steps of those that run
_UNTAKEN_MESSAGES = 1 << 16

logger = logging.getLogger(__name__)


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
    """Serves clients until told to stop or until the pipeline fails."""

    def __init__(
        self,
        engine: Engine,
        pipeline: ChannelPipeline,
        clients: zmq.Socket[bytes],
        health: StageHealth,
        failures: FailureReports,
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
            heartbeat_s: How often stages and clients are told that the driver lives.
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
        self._requests: dict[bytes, dict[str, Request]] = {}  # client -> its unfinished requests
        self._gone: set[bytes] = set()  # clients to be forgotten
        self._wakeup_out, self._wakeup_in = socket.socketpair()
        self._wakeup_in.setblocking(False)
        self._next_heartbeat_s = 0.0
        self._stopping = False

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
        poller = zmq.Poller()
        poller.register(self._clients, zmq.POLLIN)
        poller.register(self._pipeline.socket, zmq.POLLIN)
        poller.register(self._wakeup_out, zmq.POLLIN)
        if (grammars := self._engine.fileno()) is not None:
            poller.register(grammars, zmq.POLLIN)
        try:
            while not self._stopping:
                ready = dict(poller.poll(self._poll_ms()))
                if ready and ready.keys() <= {grammars} and not self._engine.relay_masks():
                    continue  # every step brings masks; the rest of this turn is for when a result has come
                if self._wakeup_out.fileno() in ready:
                    self._wakeup_out.recv(4096)
                if self._clients in ready:
                    self._receive_from_clients()
                self._send_outputs(self._engine.step())
                self._send_failures()
                self._check_health()
                self._forget_gone_clients()
        except RayppError as error:
            self._tell_all(EngineDead(error))
            raise

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
            self._tell_all(Alive())
            self._next_heartbeat_s = time.monotonic() + self._heartbeat_s
            self._draft_log.note(self._engine.stats(), time.monotonic())

    def _receive_from_clients(self) -> None:
        for _ in range(_MESSAGES_PER_TURN):  # what is left keeps the poller from waiting
            try:
                # Pictures are large: they stay where zmq put them.
                client, *frames = self._clients.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._handle(client.bytes, decode_client_message([frame.buffer for frame in frames]))

    def _handle(self, client: bytes, message: ClientMessage) -> None:
        match message:
            case OpenClient():
                self._requests.setdefault(client, {})
                self._on_connected()
            case AddRequests(requests):
                for request in requests:
                    self._add(client, request)
            case AbortRequests(request_ids):
                for request_id in request_ids:
                    if request_id in self._requests.get(client, {}):
                        self._abort(client, request_id)
            case StatsCall(call_id, spans_after_us):
                self._send(client, StatsReply(call_id, self._stats(spans_after_us)))
            case CloseClient():
                self._forget(client)

    def _add(self, client: bytes, added: AddRequest) -> None:
        request = Request(
            request_id=added.request_id,
            prompt_token_ids=added.prompt_token_ids,
            params=added.params,
            seed=added.seed,
            eos_token_ids=frozenset(added.eos_token_ids),
            bad_word_token_ids=added.bad_word_token_ids,
            priority=added.priority,
            items=added.items,
            client=client,
            handle=added.handle,
            is_streamed=added.is_streamed,
        )
        try:
            self._engine.add(request)
        except RequestError as error:
            self._send(client, Rejected(added.handle, error))
            return
        self._requests.setdefault(client, {})[request.request_id] = request

    def _abort(self, client: bytes, request_id: str) -> None:
        request = self._requests[client][request_id]
        if self._engine.abort(request):
            self._send_outputs([RequestUpdate(request, [])])

    def _send_outputs(self, updates: Sequence[RequestUpdate]) -> None:
        self._outbox.put(updates)
        for update in updates:
            if update.request.finish_reason:
                self._requests.get(update.request.client, {}).pop(update.request.request_id, None)

    def _send_failures(self) -> None:
        for request, error in self._engine.take_failed():
            self._requests.get(request.client, {}).pop(request.request_id, None)
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

    def _forget(self, client: bytes) -> None:
        """Abort what a client still has; it will be told nothing more."""
        for request in self._requests.pop(client, {}).values():
            self._engine.abort(request)
        self._outbox.forget(client)

    def _forget_gone_clients(self) -> None:
        for client in self._gone:
            logger.warning("a client vanished; its %d requests are aborted", len(self._requests.get(client, {})))
            self._forget(client)
        self._gone.clear()

    def _tell_all(self, message: DriverMessage) -> None:
        for client in self._requests:
            self._send(client, message)

    def _send(self, client: bytes, message: DriverMessage) -> None:
        try:
            self._clients.send_multipart([client, *encode_driver_message(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EHOSTUNREACH, errno.EAGAIN):
                raise
            self._gone.add(client)  # its connection has ended, or it takes nothing any more

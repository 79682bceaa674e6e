"""The driver's loop around the engine: clients on one side, stages on the other, and whatever goes wrong.

One thread owns every socket. Other threads reach it only through `stop` and `fail`, which wake it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

import zmq

from raypp.client_messages import (
    AbortRequests,
    AddRequest,
    AddRequests,
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
from raypp.driver.engine import Engine
from raypp.driver.outbox import Outbox
from raypp.errors import RayppError, RequestError, StageDiedError
from raypp.scheduler.request import Request, RequestUpdate

_MESSAGES_PER_TURN = 4  # a long list of requests must not hold up the steps of those that run

HEARTBEAT_S = 0.5
"""How often driver and stages hear of each other when nothing else is said."""


class DriverServer:
    """Serves clients until told to stop or until the pipeline fails."""

    def __init__(
        self,
        engine: Engine,
        pipeline: ChannelPipeline,
        clients: zmq.Socket[bytes],
        *,
        step_timeout_s: float,
        on_connected: Callable[[], None] = lambda: None,
    ) -> None:
        """Take over the sockets.

        Args:
            engine: What the requests go to.
            pipeline: The engine's pipeline, for its socket and its heartbeats.
            clients: A bound ROUTER.
            step_timeout_s: Steps in flight without any result for this long: the pipeline is frozen.
            on_connected: Called when a client has connected.
        """
        self._engine = engine
        self._pipeline = pipeline
        self._clients = clients
        self._step_timeout_s = step_timeout_s
        self._on_connected = on_connected
        self._outbox = Outbox(self._send)
        self._requests: dict[bytes, dict[str, Request]] = {}  # client -> its unfinished requests
        self._wakeup_out, self._wakeup_in = socket.socketpair()
        self._wakeup_in.setblocking(False)
        self._next_heartbeat_s = 0.0
        self._stopping = False
        self._failure: RayppError | None = None

    def stop(self) -> None:
        """Make `serve` return soon. From any thread."""
        self._stopping = True
        self._wake()

    def fail(self, error: RayppError) -> None:
        """Make `serve` tell the clients, and raise. From any thread; the first error counts."""
        self._failure = self._failure or error
        self._wake()

    def serve(self) -> None:
        """Run until `stop`.

        Raises:
            EngineDeadError, StageDiedError: the pipeline failed; the clients have been told.
        """
        poller = zmq.Poller()
        poller.register(self._clients, zmq.POLLIN)
        poller.register(self._pipeline.socket, zmq.POLLIN)
        poller.register(self._wakeup_out, zmq.POLLIN)
        try:
            while not self._stopping:
                ready = dict(poller.poll(round(HEARTBEAT_S * 1e3)))
                if self._clients in ready:
                    self._receive_from_clients()
                self._send_outputs(self._engine.step())
                self._check_health()
        except RayppError as error:
            self._tell_all(EngineDead(error))
            raise

    def close(self) -> None:
        """Close the sockets that wake the loop."""
        self._wakeup_in.close()
        self._wakeup_out.close()

    def _wake(self) -> None:
        try:
            self._wakeup_in.send(b"!")
        except OSError:
            return  # it is full of wake-ups already, or the loop has ended

    def _check_health(self) -> None:
        if self._failure is not None:
            raise self._failure
        if time.monotonic() >= self._next_heartbeat_s:
            self._pipeline.send_heartbeat()
            self._next_heartbeat_s = time.monotonic() + HEARTBEAT_S
        if self._engine.stalled_s > self._step_timeout_s:
            stage_index, silent_s = self._pipeline.slowest_stage()
            raise StageDiedError(
                f"stage {stage_index} is frozen: steps are in flight and none has ended",
                stage_index=stage_index,
                got=f"no result for {self._engine.stalled_s:.1f} s, no sign of the stage for {silent_s:.1f} s",
                expected=f"a result within step_timeout_s={self._step_timeout_s:g}",
                hint="raise step_timeout_s if steps of this model really take that long",
            )

    def _receive_from_clients(self) -> None:
        for _ in range(_MESSAGES_PER_TURN):  # what is left keeps the poller from waiting
            try:
                client, *frames = self._clients.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(client, decode_client_message(frames))

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
            case StatsCall(call_id):
                self._send(client, StatsReply(call_id, asdict(self._engine.stats())))
            case CloseClient():
                for request_id in self._requests.pop(client, {}):
                    self._engine.abort(request_id)
                self._outbox.forget(client)

    def _add(self, client: bytes, added: AddRequest) -> None:
        request = Request(
            request_id=added.request_id,
            prompt_token_ids=added.prompt_token_ids,
            params=added.params,
            seed=added.seed,
            eos_token_ids=frozenset(added.eos_token_ids),
            bad_word_token_ids=added.bad_word_token_ids,
            priority=added.priority,
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
        if self._engine.abort(request_id):
            self._send_outputs([RequestUpdate(request, [])])

    def _send_outputs(self, updates: Sequence[RequestUpdate]) -> None:
        self._outbox.put(updates)
        for update in updates:
            if update.request.finish_reason:
                self._requests.get(update.request.client, {}).pop(update.request.request_id, None)

    def _tell_all(self, message: DriverMessage) -> None:
        for client in self._requests:
            self._send(client, message)

    def _send(self, client: bytes, message: DriverMessage) -> None:
        self._clients.send_multipart([client, *encode_driver_message(message)])

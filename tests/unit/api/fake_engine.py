"""An engine without a model: a thread that plays the driver over the real wire."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import zmq

from raypp.client_messages import (
    AbortRequests,
    AddRequests,
    CloseClient,
    DriverMessage,
    EngineDead,
    Rejected,
    StatsCall,
    StatsReply,
    decode_client_message,
    encode_driver_message,
)
from raypp.config.engine_config import EngineConfig
from raypp.errors import RayppError, StageDiedError
from raypp.messages import OutputBatch
from raypp.request import Request
from raypp.supervision.supervisor import EngineWatcher, Recovery
from raypp.types import FinishReason

VOCAB_SIZE = 600
MAX_MODEL_LEN = 128


@dataclass(eq=False)
class Running:
    client: bytes
    request: Request
    left: list[int]


@dataclass(eq=False)
class FakeEngine:
    """A step yields up to `tokens_per_step` tokens for every request, while the gate is open or steps are granted."""

    script: Callable[[Request], list[int]]
    """The tokens of a request; they end with an EOS or stop token, or go on to max_tokens."""
    model_path: str = ""
    rejects: Callable[[Request], RayppError | None] = lambda _: None
    tokens_per_step: int = 1
    eos_token_ids: list[int] = field(default_factory=lambda: [2])
    answers_stats: bool = True
    recovers: bool = False
    """Whether it may come back when it has died: `come_back`."""
    recovers_by_itself: bool = False
    """Whether it does, as soon as a client reports its death."""
    kills: Callable[[Request], bool] = lambda _: False
    """Whether the engine dies of a request as soon as that runs."""

    def __post_init__(self) -> None:
        self.model_info = {
            "vocab_size": VOCAB_SIZE,
            "max_model_len": MAX_MODEL_LEN,
            "eos_token_ids": self.eos_token_ids,
            "model_path": self.model_path,
        }
        self.added: list[Request] = []
        self.aborted: list[str] = []
        self.num_clients_left = 0
        self.num_deaths = self.num_excused = 0
        self.is_back = self.opens_gate = True
        self.died_of_no_request = False  # whether that is known
        self.num_closed = 0
        self.stage_factory: object = None
        self._gate_is_open = True
        self._steps_granted = 0
        self._watchers: list[EngineWatcher] = []
        self._running: list[Running] = []
        self._known_clients: set[bytes] = set()
        self._changed = threading.Condition()
        self._ordering = threading.Lock()

    def launch(self, config: EngineConfig, *, stage_factory: object = None) -> FakeEngine:
        self.config = config
        self.stage_factory = stage_factory
        self._context = zmq.Context()
        self._open_clients()
        self._orders_out = self._context.socket(zmq.PAIR)
        self._orders_out.bind("inproc://orders")
        self._orders_in = self._context.socket(zmq.PAIR)
        self._orders_in.connect("inproc://orders")
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        return self

    @property
    def num_running(self) -> int:
        return len(self._running)

    def plan(self) -> dict[str, Any]:
        return {"stages": []}

    def processes(self) -> dict[str, Any]:
        return {"driver": 1, "stages": [2], "encoders": []}

    def encoder_actors(self) -> list[Any]:
        return []

    def watch(self, watcher: EngineWatcher) -> None:
        self._watchers.append(watcher)

    def report_death(self, error: RayppError, client_address: str) -> None:
        if client_address == self.client_address and self.is_back:
            self._tell_of_death(error)
            if self.recovers_by_itself:
                self.come_back()

    def excuse_restarts(self, count: int) -> None:
        self.num_excused += count

    def recoveries(self) -> list[Recovery]:
        return [Recovery("stage 1", 0.1, 0.2, 0.3)] * (self.num_deaths - (not self.is_back))

    def come_back(self) -> None:
        """Run again, at another address, after a death."""
        self._order("come back")

    def close(self) -> None:
        self.num_closed += 1
        if self.num_closed == 1:
            self._order("close")
            self._thread.join(60)
            assert not self._thread.is_alive()
            self._orders_in.close()
            self._context.term()

    def set_gate(self, *, is_open: bool) -> None:
        self._order(is_open)

    def grant_steps(self, count: int) -> None:
        """Let this many steps through a closed gate: what is left of a request then stays left."""
        self._order(count)

    def die_unseen(self, error: RayppError) -> None:
        """Only the watchers hear of it."""
        self.set_gate(is_open=False)
        self._tell_of_death(error)

    def die_loudly(self, error: RayppError) -> None:
        """Every client gets a last message."""
        self._order(error)

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, timeout_s), "the engine never saw it"

    def _order(self, order: object) -> None:
        with self._ordering:
            self._orders_in.send_pyobj(order)

    def _tell_of_death(self, error: RayppError) -> None:
        self.num_deaths += 1
        self.is_back = False
        for watcher in self._watchers:
            (watcher.engine_lost if self.recovers or self.recovers_by_itself else watcher.engine_dead)(error)

    def _open_clients(self) -> None:
        self._clients = self._context.socket(zmq.ROUTER)
        self._clients.set_hwm(0)
        self._clients.linger = 0
        self.client_address = f"tcp://127.0.0.1:{self._clients.bind_to_random_port('tcp://127.0.0.1')}"

    def _serve(self) -> None:
        order: object = None
        while order != "close":
            poller = zmq.Poller()  # the clients' socket may be another one than before
            poller.register(self._clients, zmq.POLLIN)
            poller.register(self._orders_out, zmq.POLLIN)
            steps = (self._gate_is_open or self._steps_granted > 0) and bool(self._running)
            ready = dict(poller.poll(0 if steps else None))
            if self._orders_out in ready:
                order = self._orders_out.recv_pyobj()
                self._obey(order)
            elif self._clients in ready:
                client, *frames = self._clients.recv_multipart()
                self._handle(client, frames)
            elif steps:
                self._steps_granted = max(0, self._steps_granted - 1)
                self._step()
            with self._changed:
                self._changed.notify_all()
        self._clients.close()
        self._orders_out.close()

    def _obey(self, order: object) -> None:
        if isinstance(order, bool):
            self._gate_is_open = order
        elif isinstance(order, int):
            self._steps_granted += order
        elif isinstance(order, RayppError):
            for client in self._known_clients:
                in_flight = [r.request.handle for r in self._running if r.client == client]
                self._send(client, EngineDead(order, in_flight))
            self._running.clear()
        elif order == "come back":
            old = self._clients
            self._open_clients()
            old.close(linger=1000)
            self._running.clear()
            self._known_clients.clear()
            self._gate_is_open, self._steps_granted, self.is_back = self.opens_gate, 0, True
            for watcher in self._watchers:
                watcher.engine_back(self.client_address, is_explained=self.died_of_no_request)

    def _handle(self, client: bytes, frames: list[bytes]) -> None:
        self._known_clients.add(client)
        match decode_client_message(frames):
            case AddRequests(requests):
                for request in requests:
                    self.added.append(request)
                    error = self.rejects(request)
                    if error is not None:
                        self._send(client, Rejected(request.handle, error))
                    else:
                        tokens = self.script(request)[: request.params.max_tokens]
                        self._running.append(Running(client, request, tokens[len(request.output_token_ids) :]))
            case AbortRequests(request_ids):
                self.aborted += request_ids
                self._running = [r for r in self._running if r.request.request_id not in request_ids]
            case StatsCall(call_id, _):
                if self.answers_stats:
                    self._send(client, StatsReply(call_id, {"num_running": len(self._running)}))
            case CloseClient():
                self.num_clients_left += 1
                self._running = [r for r in self._running if r.client != client]

    def _step(self) -> None:
        if any(self.kills(r.request) for r in self._running):
            self._obey(StageDiedError("stage 0 died", stage_index=0))
            return
        for client in {r.client for r in self._running}:
            self._send(client, self._outputs([r for r in self._running if r.client == client]))
        self._running = [r for r in self._running if r.left]

    def _outputs(self, running: list[Running]) -> OutputBatch:
        pieces, reasons, stop_tokens = [], [], []
        for r in running:
            piece, r.left = r.left[: self.tokens_per_step], r.left[self.tokens_per_step :]
            pieces.append(piece)
            reason, stop_token = FinishReason.NONE if r.left else FinishReason.LENGTH, -1
            if not r.left and piece[-1] in r.request.params.stop_token_ids:
                reason, stop_token = FinishReason.STOP, piece[-1]
            elif not r.left and piece[-1] in r.request.eos_token_ids:
                reason = FinishReason.STOP
            reasons.append(reason)
            stop_tokens.append(stop_token)
        count = len(running)
        return OutputBatch(
            handles=np.array([r.request.handle for r in running], np.int64),
            num_tokens=_int32s([len(p) for p in pieces]),
            token_ids=_int32s([t for p in pieces for t in p]),
            finish_reasons=_int32s(reasons),
            stop_token_ids=_int32s(stop_tokens),
            num_cached_tokens=np.full(count, 16, np.int32),
            num_preemptions=np.full(count, 1, np.int32),
            queue_us=np.full(count, 2000, np.int32),
            drafted_by_position=np.full((count, 2), 2, np.int32),
            accepted_by_position=np.tile(np.array([2, 1], np.int32), (count, 1)),
        )

    def _send(self, client: bytes, message: DriverMessage) -> None:
        self._clients.send_multipart([client, *encode_driver_message(message)])


def _int32s(values: list[int]) -> np.ndarray:
    return np.array(values, np.int32)

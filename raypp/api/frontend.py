"""The engine as its client sees it: requests go out, outputs are sorted to the requests they belong to.

One event loop, no locks. `AsyncLLM` lives on the caller's loop, `LLM` brings a thread with a loop of its own; both use
this. A step's outputs come as one message: they go straight into the requests, without a task or a queue per token.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any

from raypp.api.client import EngineClient
from raypp.api.launch import OpenEngine
from raypp.api.running_request import PreparedRequest, RunningRequest
from raypp.client_messages import (
    AbortRequests,
    AddRequest,
    AddRequests,
    Alive,
    CloseClient,
    DriverMessage,
    EngineDead,
    Rejected,
    StatsCall,
    StatsReply,
)
from raypp.errors import DeadlineError, EngineDeadError, RayppError, RequestError
from raypp.messages import OutputBatch
from raypp.types import RequestOutput

_REQUESTS_PER_MESSAGE = 64
"""The driver takes in one message between two steps: a long list must not make it late."""


class Frontend:
    """All requests of one client."""

    def __init__(self, engine: OpenEngine) -> None:
        """Connect to the engine. Must be called in the event loop that it shall live on."""
        self._loop = asyncio.get_running_loop()
        self._engine = engine
        self._death: RayppError | None = None
        self._numbers = itertools.count()
        self._running: dict[int, RunningRequest] = {}
        self._handle_of: dict[str, int] = {}
        self._stats_calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._client = EngineClient(engine.handle.client_address, self._on_message)
        engine.handle.watch(self._on_death_elsewhere)
        self._num_silent_turns = 0
        self._watchdog = self._loop.call_later(engine.config.faults.heartbeat_s, self._check_silence)

    async def stream(self, prepared: PreparedRequest) -> AsyncGenerator[RequestOutput, None]:
        """Run a request and yield its outputs so far, whenever there are new ones. Leaving early aborts it.

        Raises:
            RequestError: it was rejected.
            EngineDeadError: the engine died.
        """
        changed = asyncio.Event()
        requests = self._submit([prepared], stream=True, on_change=lambda _: changed.set())
        request = requests[0]
        try:
            while True:
                await changed.wait()
                changed.clear()
                if request.error is not None:
                    raise request.error
                output = request.output()  # all that came since the last one, if the caller is slow
                yield output
                if output.finished:
                    return
        finally:
            self._abort(requests)

    async def complete(
        self, prepared: Sequence[PreparedRequest], on_end: Callable[[], None] | None = None
    ) -> list[RequestOutput]:
        """Run requests and return their outputs, in order. Cancelling aborts them.

        Args:
            prepared: The requests.
            on_end: Called for every one that ends.

        Raises:
            RequestError: one was rejected; the others are aborted.
            EngineDeadError: the engine died.
        """
        if not prepared:
            return []
        all_ended: asyncio.Future[None] = self._loop.create_future()
        num_left = len(prepared)

        def on_change(request: RunningRequest) -> None:
            nonlocal num_left
            num_left -= 1
            if on_end is not None:
                on_end()
            if all_ended.done():
                return
            if request.error is not None:
                all_ended.set_exception(request.error)
            elif num_left == 0:
                all_ended.set_result(None)

        requests = self._submit(prepared, stream=False, on_change=on_change)
        try:
            await all_ended
        finally:
            self._abort(requests)
        return [request.output() for request in requests]

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests with what they have; ids that are not running are ignored."""
        self._abort([self._running[self._handle_of[r]] for r in request_ids if r in self._handle_of])

    async def stats(self, timeout_s: float) -> dict[str, Any]:
        """Return the engine's figures.

        Raises:
            DeadlineError: no answer in time.
            EngineDeadError: the engine died.
        """
        self._check_alive()
        call_id = next(self._numbers)
        reply: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._stats_calls[call_id] = reply
        self._client.send(StatsCall(call_id))
        try:
            async with asyncio.timeout(timeout_s):
                return await reply
        except TimeoutError:
            raise DeadlineError("the driver did not answer", expected=f"an answer within {timeout_s} s") from None
        finally:
            self._stats_calls.pop(call_id, None)

    def close(self) -> None:
        """Leave. What is still running ends with EngineDeadError."""
        self._watchdog.cancel()
        if self._death is None:
            self._client.send(CloseClient())
        self._die(EngineDeadError("the engine was closed", hint="make a new one"))
        self._client.close()

    def _check_alive(self) -> None:
        if self._death is not None:
            raise copy.copy(self._death)  # a raised error carries a traceback: one object per raise

    def _submit(
        self, prepared: Sequence[PreparedRequest], *, stream: bool, on_change: Callable[[RunningRequest], None]
    ) -> list[RunningRequest]:
        self._check_alive()
        for item in prepared:
            if item.request_id in self._handle_of:
                raise RequestError("a request of this id is running already", request_id=item.request_id)
        engine = self._engine
        running = []
        for start in range(0, len(prepared), _REQUESTS_PER_MESSAGE):
            messages = []
            for item in prepared[start : start + _REQUESTS_PER_MESSAGE]:
                handle = next(self._numbers)
                request = RunningRequest(item, handle, engine.tokenizer, stream=stream, on_change=on_change)
                self._running[handle] = request
                self._handle_of[item.request_id] = handle
                running.append(request)
                messages.append(
                    AddRequest(
                        item.request_id,
                        handle,
                        item.prompt_token_ids,
                        item.params,
                        item.seed,
                        engine.eos_token_ids,
                        is_streamed=stream or bool(item.params.stop),
                    )
                )
            self._client.send(AddRequests(messages))
        return running

    def _abort(self, requests: Iterable[RunningRequest]) -> None:
        unfinished = [request for request in requests if not request.is_ended]
        for request in unfinished:
            self._forget(request)
            request.abort()
        if unfinished and self._death is None:
            self._client.send(AbortRequests([request.request_id for request in unfinished]))

    def _forget(self, request: RunningRequest) -> None:
        del self._running[request.handle]
        del self._handle_of[request.request_id]

    def _on_message(self, message: DriverMessage) -> None:
        match message:
            case OutputBatch():
                self._on_outputs(message)
            case Rejected(handle, error):
                if (request := self._running.get(handle)) is not None:
                    self._forget(request)
                    request.fail(error)
            case StatsReply(call_id, stats):
                reply = self._stats_calls.get(call_id)
                if reply is not None and not reply.done():
                    reply.set_result(stats)
            case EngineDead(error):
                self._die(error)
            case Alive():
                pass  # that it came is all it says

    def _on_outputs(self, batch: OutputBatch) -> None:
        now_s = time.monotonic()
        token_ids = batch.token_ids.tolist()
        stopped_by_text = []
        start = 0
        columns = (
            batch.handles.tolist(),
            batch.num_tokens.tolist(),
            batch.finish_reasons.tolist(),
            batch.stop_token_ids.tolist(),
            batch.num_cached_tokens.tolist(),
            batch.num_preemptions.tolist(),
            batch.num_draft_tokens.tolist(),
            batch.num_accepted_tokens.tolist(),
        )
        for handle, num_tokens, reason, stop_token_id, *counters in zip(*columns, strict=True):
            end = start + num_tokens
            request = self._running.get(handle)
            if request is not None:  # else it was aborted while this was on its way
                request.count(*counters)
                request.update(token_ids[start:end], reason, stop_token_id, now_s)
                if request.is_ended:
                    self._forget(request)
                    if not reason:
                        stopped_by_text.append(request.request_id)
            start = end
        if stopped_by_text:
            self._client.send(AbortRequests(stopped_by_text))

    def _check_silence(self) -> None:
        """Give up on a driver that is there and says nothing: it is stopped, or hangs.

        Silence is counted in turns of this loop: while the loop itself stood still, nobody was there to hear.
        """
        faults = self._engine.config.faults
        self._num_silent_turns = 0 if self._client.was_heard() else self._num_silent_turns + 1
        silent_s = self._num_silent_turns * faults.heartbeat_s
        if silent_s > faults.silence_timeout_s:
            self._die(
                EngineDeadError(
                    "the driver is frozen: nothing has been heard of it",
                    got=f"no message for {silent_s:.1f} s",
                    expected=f"a heartbeat within {faults.silence_timeout_s:g} s",
                    hint="its process is stopped or starved",
                )
            )
        if self._death is None:
            self._watchdog = self._loop.call_later(faults.heartbeat_s, self._check_silence)

    def _on_death_elsewhere(self, error: RayppError) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is gone, and with it everybody who could want to know
            self._loop.call_soon_threadsafe(self._die, error)

    def _die(self, error: RayppError) -> None:
        if self._death is not None:
            return
        self._death = error
        for request in list(self._running.values()):
            self._forget(request)
            request.fail(copy.copy(error))
        for reply in self._stats_calls.values():
            if not reply.done():
                reply.set_exception(copy.copy(error))

"""The engine as its client sees it: requests go out, outputs are sorted to the requests they belong to.

One event loop, no locks. `AsyncLLM` lives on the caller's loop, `LLM` brings a thread with a loop of its own; both use
this. A step's outputs come as one message: they go straight into the requests, without a task or a queue per token.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from raypp.api.client import EngineClient
from raypp.api.launch import OpenEngine
from raypp.api.output_logprobs import logprobs_per_request
from raypp.api.running_completion import RunningCompletion
from raypp.api.running_request import PreparedRequest, RunningRequest
from raypp.api.send_window import SendWindow
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

_log = logging.getLogger(__name__)

_REQUESTS_PER_MESSAGE = 16
"""The driver reads a message's header at once, between two steps. The continuations of one prompt stay together."""


class Frontend:
    """All requests of one client."""

    def __init__(self, engine: OpenEngine) -> None:
        """Connect to the engine. Must be called in the event loop that it shall live on."""
        self._loop = asyncio.get_running_loop()
        self._engine = engine
        self._death: RayppError | None = None
        self._numbers = itertools.count()
        self._requests: dict[str, RunningRequest] = {}
        self._unsent: dict[int, dict[str, bool]] = {}  # of each list that waits for room: ids, and whether aborted
        self._completions: dict[int, tuple[RunningRequest, RunningCompletion]] = {}  # by handle, unfinished ones
        self._stats_calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._client = EngineClient(engine.handle.client_address, self._on_message)
        engine.handle.watch(self)
        self._num_silent_turns = 0
        self._is_closing = False
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

        A list may be longer than what the engine has room for: then the rest is sent as others end.

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
        self._check_ids(prepared)
        num_left, window, requests = len(prepared), SendWindow(prepared, self._engine.config), list[RunningRequest]()
        unsent = {item.request_id: False for item in prepared}
        is_sending = False

        def send() -> None:
            nonlocal is_sending
            if is_sending:
                return  # whoever is at it goes on
            is_sending = True
            try:
                while not all_ended.done() and (more := window.take()):
                    aborted = {item.request_id for item in more if unsent.pop(item.request_id)}
                    sent = self._submit(more, stream=False, on_change=on_change)
                    requests.extend(sent)
                    self._abort(request for request in sent if request.request_id in aborted)
            finally:
                is_sending = False

        def on_change(request: RunningRequest) -> None:
            nonlocal num_left
            num_left -= 1
            window.note_ended(request.request_id)
            error: Exception | None = request.error
            try:
                if on_end is not None:
                    on_end()
                if error is None and not all_ended.done():
                    send()
            except Exception as its_own:  # of the caller's function, or no request can be sent any more
                error = error or its_own
            if all_ended.done():
                return
            if error is not None:
                all_ended.set_exception(error)
            elif num_left == 0:
                all_ended.set_result(None)

        try:
            send()
            if unsent:
                self._unsent[id(unsent)] = unsent
            await all_ended
        finally:
            all_ended.cancel()  # nothing more is sent
            self._unsent.pop(id(unsent), None)
            self._abort(requests)
        return [request.output() for request in requests]

    def abort(self, request_ids: Collection[str]) -> None:
        """End requests with what they have; ids that are not running are ignored."""
        for unsent in self._unsent.values():
            unsent.update(dict.fromkeys(unsent.keys() & set(request_ids), True))
        self._abort([self._requests[r] for r in request_ids if r in self._requests])

    async def stats(self, timeout_s: float, spans_after_us: int | None = None) -> dict[str, Any]:
        """Return the engine's figures, with the stages' forwards that ended after a time if one is given.

        Raises:
            DeadlineError: no answer in time.
            EngineDeadError: the engine died.
        """
        self._check_alive()
        call_id = next(self._numbers)
        reply: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._stats_calls[call_id] = reply
        self._client.send(StatsCall(call_id, spans_after_us))
        try:
            async with asyncio.timeout(timeout_s):
                return await reply
        except TimeoutError:
            raise DeadlineError("the driver did not answer", expected=f"an answer within {timeout_s} s") from None
        finally:
            self._stats_calls.pop(call_id, None)

    def close(self) -> None:
        """Leave. What is still running ends with EngineDeadError."""
        self._is_closing = True
        self._watchdog.cancel()
        if self._death is None:
            self._client.send(CloseClient())
        self._die(EngineDeadError("the engine was closed", hint="start a new engine"))
        self._client.close()

    def _check_alive(self) -> None:
        if self._death is not None:
            raise copy.copy(self._death)  # a raised error carries a traceback: one object per raise

    def _submit(
        self, prepared: Sequence[PreparedRequest], *, stream: bool, on_change: Callable[[RunningRequest], None]
    ) -> list[RunningRequest]:
        self._check_alive()
        self._check_ids(prepared)
        running, messages = list[RunningRequest](), list[AddRequest]()
        for item in prepared:
            handles = [next(self._numbers) for _ in range(item.params.n)]
            request = RunningRequest(item, handles, self._engine.tokenizer, stream=stream, on_change=on_change)
            self._requests[item.request_id] = request
            self._completions |= {c.handle: (request, c) for c in request.completions}
            running.append(request)
            if messages and len(messages) + len(handles) > _REQUESTS_PER_MESSAGE:
                self._client.send(AddRequests(messages))
                messages = []
            messages += [self._message(item, completion, stream) for completion in request.completions]
        if messages:
            self._client.send(AddRequests(messages))
        return running

    def _check_ids(self, prepared: Sequence[PreparedRequest]) -> None:
        for item in prepared:
            if item.request_id in self._requests or any(item.request_id in unsent for unsent in self._unsent.values()):
                raise RequestError(
                    "a request of this id is running already",
                    request_id=item.request_id,
                    got=item.request_id,
                    expected="an id of its own",
                )

    def _message(self, item: PreparedRequest, completion: RunningCompletion, stream: bool) -> AddRequest:
        """Return what the engine is told of a continuation: to it, each is a request of its own."""
        params = item.params
        if completion.index > 0 and params.prompt_logprobs is not None:
            params = replace(params, prompt_logprobs=None)  # the first one brings them
        return AddRequest(
            completion.engine_id,
            completion.handle,
            item.prompt_token_ids,
            params,
            item.seed_of(completion.index),
            self._engine.eos_token_ids,
            item.bad_word_token_ids,
            item.priority,
            is_streamed=stream or bool(params.stop),
            items=item.items,
            cache_salt=item.cache_salt,
        )

    def _abort(self, requests: Iterable[RunningRequest]) -> None:
        unfinished = [request for request in requests if not request.is_ended]
        engine_ids = [completion.engine_id for request in unfinished for completion in request.unfinished]
        self._abort_in_engine(engine_ids)
        for request in unfinished:
            self._forget(request)
            try:
                request.abort()
            except Exception as error:  # the last of its text
                request.fail(_text_error(request.request_id, error))

    def _abort_in_engine(self, engine_ids: list[str]) -> None:
        if engine_ids and self._death is None:
            self._client.send(AbortRequests(engine_ids))

    def _forget(self, request: RunningRequest) -> None:
        del self._requests[request.request_id]
        for completion in request.completions:
            self._completions.pop(completion.handle, None)

    def _fail(self, request: RunningRequest, error: RayppError, *, but: int | None = None) -> None:
        """End a request with an error; the engine need not be told of the continuation with the handle `but`."""
        self._forget(request)
        engine_ids = [completion.engine_id for completion in request.unfinished if completion.handle != but]
        request.fail(error)
        self._abort_in_engine(engine_ids)

    def _on_message(self, message: DriverMessage) -> None:
        match message:
            case OutputBatch():
                self._on_outputs(message)
            case Rejected(handle, error):
                if handle in self._completions:
                    request, _ = self._completions[handle]
                    if isinstance(error, RequestError):
                        error.request_id = request.request_id
                    self._fail(request, error, but=handle)
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
        stopped_by_text: list[str] = []
        start = 0
        columns = (
            batch.handles.tolist(),
            batch.num_tokens.tolist(),
            batch.finish_reasons.tolist(),
            batch.stop_token_ids.tolist(),
            logprobs_per_request(batch),
            zip(
                batch.num_cached_tokens.tolist(),
                batch.num_preemptions.tolist(),
                batch.drafted_by_position.tolist(),
                batch.accepted_by_position.tolist(),
                batch.queue_us.tolist(),
                strict=True,
            ),
        )
        for handle, num_tokens, reason, stop_token_id, (logprobs, prompt_logprobs), counters in zip(
            *columns, strict=True
        ):
            new_token_ids = token_ids[start : start + num_tokens]
            start += num_tokens
            if handle not in self._completions:
                continue  # it was aborted while this was on its way
            request, completion = self._completions[handle]
            completion.counters = counters
            try:
                completion.update(new_token_ids, reason, stop_token_id, logprobs)
                request.add_prompt_logprobs(prompt_logprobs)
            except Exception as error:  # whatever a tokenizer makes of these tokens: the other requests go on
                _log.exception("request %s cannot be continued", request.request_id)
                self._fail(request, _text_error(request.request_id, error), but=handle if reason else None)
                continue
            if completion.is_ended:
                del self._completions[handle]
                if not reason:
                    stopped_by_text.append(completion.engine_id)
            if not request.unfinished:
                self._forget(request)
            request.note_update(num_tokens, now_s)
        self._abort_in_engine(stopped_by_text)

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

    def engine_lost(self, error: RayppError) -> None:
        """End all requests: they are not handed over yet. From another thread."""
        self.engine_dead(error)

    def engine_back(self, client_address: str) -> None:
        """Do nothing. From another thread."""

    def engine_dead(self, error: RayppError) -> None:
        """End all requests. From another thread."""
        with contextlib.suppress(RuntimeError):  # the loop is gone, and with it everybody who could want to know
            self._loop.call_soon_threadsafe(self._die, error)

    def _die(self, error: RayppError) -> None:
        if self._death is not None:
            return
        self._death = error
        if not self._is_closing:
            _log.error("%s; running requests that it ends: %d", error, len(self._requests))
        for request in list(self._requests.values()):
            self._forget(request)
            request.fail(copy.copy(error))
        for reply in self._stats_calls.values():
            if not reply.done():
                reply.set_exception(copy.copy(error))


def _text_error(request_id: str, error: Exception) -> RequestError:
    return RequestError(
        "the tokens of this request cannot be turned into text",
        request_id=request_id,
        got=f"{type(error).__name__}: {error}",
        expected="a tokenizer that decodes every token of the model",
        hint="detokenize=False returns the tokens alone",
    )

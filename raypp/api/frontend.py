"""The engine as its client sees it: requests go out, outputs are sorted to the requests they belong to.

One event loop, no locks. `AsyncLLM` lives on the caller's loop, `LLM` brings a thread with a loop of its own; both use
this. A step's outputs come as one message: they go straight into the requests, without a task or a queue per token.

While an engine that died is started again, its requests stay here, new ones join them, and all can be aborted. The next
engine gets what is unfinished, each continuation with the tokens that it has, and goes on with the same text.

A long list of requests is sent in parts (`SendWindow`): the engine refuses what it has no room for. What is not sent
waits here, with the caller, which holds it anyway.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from raypp.api.engine_connection import EngineConnection
from raypp.api.launch import OpenEngine
from raypp.api.poison_requests import PoisonDetector, poison_error
from raypp.api.running_request import (
    PreparedRequest,
    RunningCompletion,
    RunningRequest,
    logprobs_per_request,
    messages_of_begun,
    messages_of_new,
)
from raypp.client_messages import AbortRequests, DriverMessage, Rejected, StatsCall, StatsReply
from raypp.config.engine_config import EngineConfig
from raypp.errors import DeadlineError, EngineDeadError, RayppError, RequestError, StageDiedError
from raypp.messages import OutputBatch
from raypp.prompt_items import unique_items
from raypp.request import REQUEST_BYTES, Request, RequestMemory
from raypp.supervision.supervisor import Recovery
from raypp.types import RequestOutput


class SendWindow:
    """The requests of one list, handed out in order as the engine gets room for them.

    Half of what the engine may hold is for others. A request that is larger than that goes alone.

    Args:
        prepared: The list.
        config: Of the engine.
    """

    def __init__(self, prepared: Sequence[PreparedRequest], config: EngineConfig) -> None:
        self.waiting = deque(prepared)
        self._max_bytes = config.scheduler.max_waiting_bytes // 2
        self._max_pixel_bytes = config.encoder.max_waiting_pixel_bytes // 2
        self._sizes: dict[str, tuple[int, int]] = {}  # of those sent and not ended: request and pixels
        self._num_bytes = self._num_pixel_bytes = 0

    def take(self) -> list[PreparedRequest]:
        """Return the next ones that may be sent."""
        taken = []
        while self.waiting:
            size, pixel_size = _sizes_of(self.waiting[0].request)
            if self._sizes and (
                self._num_bytes + size > self._max_bytes or self._num_pixel_bytes + pixel_size > self._max_pixel_bytes
            ):
                break
            prepared = self.waiting.popleft()
            self._sizes[prepared.request.request_id] = size, pixel_size
            self._num_bytes += size
            self._num_pixel_bytes += pixel_size
            taken.append(prepared)
        return taken

    def note_ended(self, request_id: str) -> None:
        """Take in that a request that was sent has ended."""
        size, pixel_size = self._sizes.pop(request_id)
        self._num_bytes -= size
        self._num_pixel_bytes -= pixel_size


def _sizes_of(request: Request) -> tuple[int, int]:
    items = () if request.items is None else unique_items(request.items.items)
    return (
        request.params.n * (REQUEST_BYTES + request.prompt_token_ids.nbytes),
        sum(item.patches.nbytes for item in items),
    )


class WaitingRoom:
    """Counts a client's requests against the limits that the engine has for those of all clients.

    Args:
        config: Of the engine.
        requests: Those that it had; they stay, whether there is room or not.
    """

    def __init__(self, config: EngineConfig, requests: Iterable[RunningRequest]) -> None:
        self._memory = RequestMemory(
            max_bytes=config.scheduler.max_waiting_bytes, max_pixel_bytes=config.encoder.max_waiting_pixel_bytes
        )
        for request in requests:
            with suppress(RequestError):  # there never was room, and it was about to be refused
                self._add(request, is_new=False)

    def enter(self, requests: Sequence[RunningRequest]) -> None:
        """Have new requests wait, all or none.

        Raises:
            QueueFullError: there is no room now.
            RequestError: there never is for one of them.
        """
        try:
            for request in requests:
                self._add(request, is_new=True)
        except RayppError:
            for request in requests:
                self.leave(request)
            raise

    def leave(self, request: RunningRequest) -> None:
        """Take in that a request has ended; one that is not here is ignored."""
        for completion in request.completions:
            self._memory.remove(completion.engine_id)

    def _add(self, request: RunningRequest, *, is_new: bool) -> None:
        for completion in request.unfinished:
            self._memory.add(completion.engine_id, request.prepared.request, is_new=is_new)


class RecoveryLog:
    """Times the pauses of one client, from the moment that it hears of a death until it has handed its requests over.

    Args:
        clock: Monotonic, seconds; for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s: float | None = None
        self._paused_s = 0.0
        self._last_paused_s = self._hand_over_s = 0.0
        self._num_carried_over = 0

    @property
    def is_paused(self) -> bool:
        """Whether the engine is being started again."""
        return self._began_s is not None

    def begin(self) -> None:
        """Take in that the engine died."""
        if self._began_s is None:
            self._began_s = self._clock()

    def end(self, num_requests: int, back_s: float) -> None:
        """Take in that requests go on.

        Args:
            num_requests: How many were unfinished.
            back_s: When the engine was heard to run again, by the clock.
        """
        assert self._began_s is not None
        now_s = self._clock()
        self._last_paused_s, self._began_s = now_s - self._began_s, None
        self._paused_s += self._last_paused_s
        self._hand_over_s = now_s - back_s
        self._num_carried_over += num_requests
        _log.info("%d requests go on after %.1f s", num_requests, self._last_paused_s)

    def figures(self, recoveries: Sequence[Recovery]) -> dict[str, Any]:
        """Return them as `stats()` has them.

        `recoveries.last` is the engine's `Recovery`, with `hand_over_s`, what handing over the requests took, and
        `paused_s`, from the moment that this client heard of the death to the end of that.

        Args:
            recoveries: Of the engine.
        """
        paused_s = self._paused_s + (0.0 if self._began_s is None else self._clock() - self._began_s)
        last = None
        if recoveries:
            last = {**asdict(recoveries[-1]), "hand_over_s": self._hand_over_s, "paused_s": self._last_paused_s}
        return {
            "is_recovering": self.is_paused,
            "recoveries": {
                "count": len(recoveries),
                "paused_s": paused_s,
                "num_carried_over": self._num_carried_over,
                "last": last,
            },
        }


_log = logging.getLogger(__name__)


class Frontend:
    """All requests of one client."""

    def __init__(self, engine: OpenEngine) -> None:
        """Connect to the engine. Must be called in the event loop that it shall live on."""
        self._loop = asyncio.get_running_loop()
        self._engine = engine
        self._death: RayppError | None = None
        self._numbers = itertools.count()
        self._requests: dict[str, RunningRequest] = {}
        self._unsent: dict[str, bool] = {}  # of lists that wait for room: ids, and whether they were aborted
        self._completions: dict[int, tuple[RunningRequest, RunningCompletion]] = {}  # by handle, unfinished ones
        self._stats_calls: dict[int, asyncio.Future[dict[str, Any] | None]] = {}
        self._waiting_room: WaitingRoom | None = None  # while there is no engine
        self._had: list[str] = []  # the requests that the engine had when it died
        self._recoveries = RecoveryLog()
        self._poison = PoisonDetector()
        self._connection = EngineConnection(engine.handle, engine.config.faults, self)

    @property
    def is_recovering(self) -> bool:
        """Whether the engine is being started again."""
        return self._recoveries.is_paused and self._death is None

    async def stream(self, prepared: PreparedRequest, *, deltas: bool = False) -> AsyncGenerator[RequestOutput, None]:
        """Run a request and yield its outputs so far, or what is new of them, whenever there are new ones.

        Leaving early aborts it.

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
                output = request.output(only_new=deltas)  # all that came since the last one, if the caller is slow
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
        self._check_ids(prepared)
        num_left, window, requests = len(prepared), SendWindow(prepared, self._engine.config), list[RunningRequest]()
        self._unsent |= {item.request.request_id: False for item in prepared}
        changed, errors = asyncio.Event(), list[Exception]()

        def on_change(request: RunningRequest) -> None:
            nonlocal num_left
            num_left -= 1
            window.note_ended(request.request_id)
            if request.error is not None:
                errors.append(request.error)
            try:
                if on_end is not None:
                    on_end()
            except Exception as its_own:
                errors.append(its_own)
            changed.set()

        try:
            while num_left and not errors:
                changed.clear()
                while not errors and (more := window.take()):
                    aborted = {item.request.request_id for item in more if self._unsent.pop(item.request.request_id)}
                    sent = self._submit(more, stream=False, on_change=on_change)
                    requests += sent
                    self._abort(request for request in sent if request.request_id in aborted)
                await changed.wait()
        finally:
            for item in window.waiting:
                del self._unsent[item.request.request_id]
            self._abort(requests)
        if errors:
            raise errors[0]
        return [request.output() for request in requests]

    def abort(self, request_ids: Collection[str]) -> None:
        """End requests with what they have; ids that are not running are ignored."""
        self._unsent |= dict.fromkeys(self._unsent.keys() & set(request_ids), True)
        self._abort([self._requests[r] for r in request_ids if r in self._requests])

    async def stats(self, timeout_s: float, spans_after_us: int | None = None) -> dict[str, Any]:
        """Return the engine's figures, with the stages' forwards that ended after a time if one is given.

        While the engine is started again these are few, and come at once: see `RecoveryLog.figures`.

        Raises:
            DeadlineError: no answer in time.
            EngineDeadError: the engine died.
        """
        self.check_alive()
        if not self._connection.is_open:
            return self._figures()
        call_id = next(self._numbers)
        reply: asyncio.Future[dict[str, Any] | None] = self._loop.create_future()
        self._stats_calls[call_id] = reply
        self._connection.send(StatsCall(call_id, spans_after_us))
        try:
            async with asyncio.timeout(timeout_s):
                return self._figures(await reply)
        except TimeoutError:
            raise DeadlineError("the driver did not answer", expected=f"an answer within {timeout_s} s") from None
        finally:
            self._stats_calls.pop(call_id, None)

    def check_alive(self) -> None:
        """Raise what the engine died of for good, if it did; one that is being started again is alive."""
        if self._death is not None:
            raise copy.copy(self._death)  # a raised error carries a traceback: one object per raise

    def close(self) -> None:
        """Leave. What is still running ends with EngineDeadError."""
        self._connection.close()
        self._end_all(EngineDeadError("the engine was closed", hint="start a new engine"))

    def on_message(self, message: DriverMessage) -> None:
        """Take in what the driver sends."""
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

    def on_lost(self, error: RayppError | None) -> None:
        """Keep all requests: the engine died, and may come back."""
        self._recoveries.begin()
        self._poison.note_loss(error.stage_index if isinstance(error, StageDiedError) else "driver")
        self._waiting_room = WaitingRoom(self._engine.config, self._requests.values())
        self._had = list(self._requests)
        for reply in self._stats_calls.values():
            if not reply.done():
                reply.set_result(None)

    def on_back(self, in_flight: Collection[int] | None, *, is_explained: bool) -> None:
        """Hand over what is unfinished: the engine runs again."""
        back_s, self._waiting_room = time.monotonic(), None
        poison_id = self._find_poison(in_flight, is_explained=is_explained)
        unfinished = {name: request.num_tokens for name, request in self._requests.items() if name != poison_id}
        self._send_begun(self._poison.begin(unfinished))
        self._recoveries.end(len(unfinished), back_s)
        if poison_id is not None:
            self._fail(self._requests[poison_id], poison_error(poison_id))
        self._run_suspect()
        self._loop.call_later(self._poison.wait_s, self._run_suspect)

    def on_dead(self, error: RayppError) -> None:
        """End all requests: the engine died for good."""
        _log.error("%s; running requests that it ends: %d", error, len(self._requests))
        self._end_all(error)

    def _end_all(self, error: RayppError) -> None:
        if self._death is not None:
            return
        self._death = error
        for request in list(self._requests.values()):
            self._forget(request)
            request.fail(copy.copy(error))
        for reply in self._stats_calls.values():
            if not reply.done():
                reply.set_exception(copy.copy(error))

    def _find_poison(self, in_flight: Collection[int] | None, *, is_explained: bool) -> str | None:
        """Take in that the engine may have died of a request; return the id of the one that it surely died of."""
        finding = self._poison.note_death(
            None if in_flight is None else self._ids_of(in_flight),
            {name: self._requests[name].num_tokens for name in self._had if name in self._requests},
            max_running=self._engine.config.scheduler.max_num_seqs,
            is_explained=is_explained,
        )
        self._engine.handle.excuse_restarts(finding.num_excused)
        return finding.poison_id

    def _run_suspect(self) -> None:
        is_open = self._connection.is_open
        if is_open and self._poison.suspects and (request_id := self._poison.next(self._requests)) is not None:
            _log.info("an engine died before request %s had a token: it is handed over after others", request_id)
            self._send_begun([request_id], goes_first=True)

    def _ids_of(self, handles: Iterable[int]) -> set[str]:
        """Return the requests of these continuations, as far as they are unfinished."""
        return {self._completions[handle][0].request_id for handle in handles if handle in self._completions}

    def _send_begun(self, request_ids: Iterable[str], *, goes_first: bool = False) -> None:
        max_running = self._engine.config.scheduler.max_num_seqs
        begun = ((r, c) for name in request_ids for r in [self._requests[name]] for c in r.unfinished)
        for message in messages_of_begun(begun, max_running, goes_first=goes_first):
            self._connection.send(message)

    def _figures(self, of_engine: Mapping[str, Any] | None = None) -> dict[str, Any]:
        if of_engine is None:  # what there is waits here
            of_engine = {"num_running": 0, "num_waiting": len(self._completions), "num_in_flight": 0}
        return {**of_engine, **self._recoveries.figures(self._engine.handle.recoveries())}

    def _submit(
        self, prepared: Sequence[PreparedRequest], *, stream: bool, on_change: Callable[[RunningRequest], None]
    ) -> list[RunningRequest]:
        self.check_alive()
        self._check_ids(prepared)
        running = [
            RunningRequest(
                item,
                [next(self._numbers) for _ in range(item.request.params.n)],
                self._engine.tokenizer,
                stream=stream,
                on_change=on_change,
            )
            for item in prepared
        ]
        if self._waiting_room is not None:
            self._waiting_room.enter(running)
        for request in running:
            self._requests[request.request_id] = request
            self._completions |= {c.handle: (request, c) for c in request.completions}
        if self._connection.is_open:
            for message in messages_of_new(running):
                self._connection.send(message)
        return running

    def _check_ids(self, prepared: Sequence[PreparedRequest]) -> None:
        for item in prepared:
            if item.request.request_id in self._requests or item.request.request_id in self._unsent:
                raise RequestError(
                    "a request of this id is running already",
                    request_id=item.request.request_id,
                    got=item.request.request_id,
                    expected="an id of its own",
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
        self._run_suspect()

    def _abort_in_engine(self, engine_ids: list[str]) -> None:
        if engine_ids and self._connection.is_open:
            self._connection.send(AbortRequests(engine_ids))

    def _forget(self, request: RunningRequest) -> None:
        del self._requests[request.request_id]
        for completion in request.completions:
            self._completions.pop(completion.handle, None)
        if self._waiting_room is not None:
            self._waiting_room.leave(request)

    def _fail(self, request: RunningRequest, error: RayppError, *, but: int | None = None) -> None:
        """End a request with an error, and abort its continuations in the engine, but for the handle `but`."""
        self._forget(request)
        engine_ids = [completion.engine_id for completion in request.unfinished if completion.handle != but]
        request.fail(error)
        self._abort_in_engine(engine_ids)
        self._run_suspect()

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
        if self._poison.suspects:
            self._poison.note_tokens(self._ids_of(h for h, n in zip(*columns[:2], strict=True) if n))
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
        self._run_suspect()


def _text_error(request_id: str, error: Exception) -> RequestError:
    return RequestError(
        "the tokens of this request cannot be turned into text",
        request_id=request_id,
        got=f"{type(error).__name__}: {error}",
        expected="a tokenizer that decodes every token of the model",
        hint="detokenize=False returns the tokens alone",
    )

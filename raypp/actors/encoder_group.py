"""The encoders of one engine, on the driver's side: starts them, hands them work, and restarts those that die.

    driver's loop --encode, drop--> thread of the group --calls--> encoder actors --put_items--> first stage
         ^                                |   ^  answers, deaths       |
         +---------- events --------------+   +------------------------+

They are children of the driver's process: when that dies, they end. One that dies itself is made again by Ray;
what it had under way is encoded again, there or by another one. Nothing of that is on the path of a step.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray

from raypp.actors.deadline import Deadline, in_short, raypp_errors
from raypp.actors.encoder_actor import EncoderActor
from raypp.actors.placement import BundlePlace, Placement
from raypp.actors.processes import ActorProcess, end_processes
from raypp.driver.item_encoders import (
    EncodeCall,
    EncoderShares,
    ItemEvent,
    ItemFailed,
    ItemsDropped,
    ItemsStored,
    encoder_sums,
)
from raypp.encoder.protocol import EncoderSpec, ItemFault
from raypp.errors import EncoderDiedError, RayppError
from raypp.plan.engine_plan import EnginePlan
from raypp.prompt_items import EncoderItem

_TICK_S = 0.5
_KILL_S = 1.0

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Encoder:
    """One actor, and what is known of it."""

    index: int
    actor: Any
    spec: EncoderSpec
    process: ActorProcess | None = None
    life: int = 0  # how often it was started again: answers of an earlier life are ignored
    is_gone: bool = False
    loading_since_s: float | None = None
    counted: dict[str, Any] | None = None  # when it answered last
    called_at_s: dict[EncodeCall, float] = field(default_factory=dict)


class EncoderGroup:
    """All encoder actors of an engine; see `ItemEncoders`.

    Args:
        plan: Of the engine; it has encoders.
        placement: Where they run.
        first_stage: The actors that embeddings go to, of its members.
        on_event: Called, from another thread, when `poll` has something to return.
        on_end: Called, from another thread, when the last encoder cannot be started again, with the reason.
    """

    def __init__(
        self,
        plan: EnginePlan,
        placement: Placement,
        first_stage: Sequence[Any],
        on_event: Callable[[], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._silence_s = plan.config.encoder.encoder_timeout_s
        self._start_timeout_s = plan.config.faults.start_timeout_s
        self._first_stage = first_stage
        self._driver = ActorProcess.of_this_process()
        self._config = plan.model
        self._model = None if placement.is_on_one_node else (plan.config.model.model, plan.config.model.revision)
        self._on_event = on_event
        self._on_end = on_end
        self._encoders = [
            _Encoder(index, _make_actor(plan, placement, place), plan.encoders.spec(index))
            for index, place in enumerate(placement.encoders)
        ]
        self._shares = EncoderShares(plan.encoders.num_encoders, plan.config.encoder.max_images_per_batch)
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._events: list[ItemEvent] = []
        self._lock = threading.Lock()  # of the events, and of what has been counted
        self._thread = threading.Thread(target=self._run, name="encoder-group", daemon=True)
        self._loads: list[Any] = []
        self._past: list[dict[str, Any]] = []  # what encoders counted in lives that are over

    def start(self, deadline: Deadline) -> None:
        """Wait for the processes.

        Raises:
            EngineDeadError, DeadlineError: one does not start.
        """
        with raypp_errors(f"start_timeout_s={deadline.seconds:g}"):
            processes = ray.get([e.actor.process.remote() for e in self._encoders], timeout=deadline.remaining_s)
        for encoder, process in zip(self._encoders, processes, strict=True):
            encoder.process = process

    def load(self) -> None:
        """Have the encoders load their model; does not wait."""
        self._loads = [self._load(encoder) for encoder in self._encoders]

    def join(self, deadline: Deadline) -> None:
        """Wait for them, join them to the first stage, which is connected, and start serving.

        Raises:
            ModelLoadError, ResourceError: one cannot read its model, or it does not fit.
            EngineDeadError, DeadlineError: one does not come through.
        """
        with raypp_errors(f"start_timeout_s={deadline.seconds:g}"):
            processes: list[ActorProcess] = ray.get(self._loads, timeout=deadline.remaining_s)
            ray.get(
                [encoder.actor.join.remote(self._first_stage) for encoder in self._encoders],
                timeout=deadline.remaining_s,
            )
        for encoder, process in zip(self._encoders, processes, strict=True):
            encoder.process = process
            self._tasks.put(partial(self._up, encoder))
        self._thread.start()

    def encode(self, items: Sequence[EncoderItem]) -> None:
        """Have items encoded and brought to the first stage. Does not wait."""
        self._tasks.put(partial(self._order, items))

    def drop(self, keys: Sequence[bytes]) -> None:
        """Have the first stage drop embeddings. Does not wait."""
        missing = len(self._first_stage)

        def dropped(answer: Future[Any]) -> None:
            nonlocal missing
            if answer.exception() is None:  # else the first stage is dead, and the engine with it
                missing -= 1
                if not missing:
                    self._tell([ItemsDropped(keys)])

        def drop() -> None:
            for member in self._first_stage:
                self._when_done(member.drop_items.remote(keys), dropped)

        self._tasks.put(drop)

    def poll(self) -> list[ItemEvent]:
        """Return what happened since the last call."""
        with self._lock:
            events, self._events = self._events, []
        return events

    def stats(self) -> dict[str, Any]:
        """Return figures, as far as they are known without asking the encoders: as of their last batches."""
        with self._lock:
            counted, past = [encoder.counted for encoder in self._encoders], list(self._past)
        whole = {
            "num_encoders": len(self._encoders),
            "num_up": len(self._shares.up),
            "num_waiting_items": self._shares.num_waiting,
            "num_items_under_way": sum(
                len(call.items) for encoder in self._encoders for call in self._shares.calls_of(encoder.index)
            ),
            "num_deaths": sum(encoder.life for encoder in self._encoders),
            "actors": counted,
        }
        return {"encoders": whole, **encoder_sums([*past, *(of for of in counted if of is not None)])}

    @property
    def actors(self) -> list[Any]:
        """The actors, for clients that have images encoded without a request."""
        return [encoder.actor for encoder in self._encoders]

    def processes(self) -> list[ActorProcess]:
        """Return the processes that run now."""
        return [encoder.process for encoder in self._encoders if encoder.process is not None]

    def kill(self) -> None:
        """End the actors at once."""
        self._tasks.put(None)
        for encoder in self._encoders:
            ray.kill(encoder.actor)
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        next_check_s = time.monotonic()
        while True:
            try:
                task = self._tasks.get(timeout=_TICK_S)
                if task is None:
                    return
                task()
            except queue.Empty:
                pass
            if time.monotonic() >= next_check_s:
                self._check_silence()
                next_check_s = time.monotonic() + _TICK_S

    def _order(self, items: Sequence[EncoderItem]) -> None:
        self._shares.add(items)
        self._call()

    def _call(self) -> None:
        """Give the encoders what they can take."""
        if all(encoder.is_gone for encoder in self._encoders):
            error = EncoderDiedError(
                "the encoders have failed, and images cannot be encoded",
                hint="start a new engine; the log says why they died",
            )
            self._fail(self._shares.give_up(), error)
            return
        while calls := self._shares.assign():
            for call in calls:
                encoder = self._encoders[call.encoder_index]
                encoder.called_at_s[call] = time.monotonic()
                self._ask(encoder, encoder.actor.deliver.remote(call.items), partial(self._delivered, encoder, call))

    def _delivered(self, encoder: _Encoder, call: EncodeCall, answer: tuple[list[ItemFault], dict[str, Any]]) -> None:
        faults, encoder.counted = answer
        encoder.called_at_s.pop(call, None)
        self._shares.note_done(call)
        for later in self._shares.calls_of(encoder.index):
            encoder.called_at_s[later] = time.monotonic()  # it begins now
        errors = {fault.key: fault.error for fault in faults}
        stored = [item.key for item in call.items if item.key not in errors]
        self._tell([ItemsStored(stored)] if stored else [])
        self._tell([ItemFailed(key, error) for key, error in errors.items()])
        self._call()

    def _ask(self, encoder: _Encoder, ref: Any, then: Callable[[Any], None]) -> None:
        """Call `then` with the answer to a call; if the encoder fails instead, start it again."""
        life = encoder.life

        def answered(answer: Future[Any]) -> None:
            if encoder.life != life or encoder.is_gone:
                return  # that death has been dealt with
            if (error := answer.exception()) is not None:
                self._lost(encoder, error)
            else:
                then(answer.result())

        self._when_done(ref, answered)

    def _lost(self, encoder: _Encoder, error: BaseException) -> None:
        """Deal with an encoder that died, or whose device failed."""
        logger.warning("encoder %d failed, and is started again: %s", encoder.index, in_short(error))
        encoder.life += 1
        with self._lock:  # nothing is counted twice
            if encoder.counted is not None:
                self._past.append(encoder.counted)
                encoder.counted = None
        encoder.called_at_s.clear()
        given_up = self._shares.note_down(encoder.index)
        self._fail(given_up, EncoderDiedError("an encoder died repeatedly on this image", got=in_short(error)))
        if not isinstance(error, ray.exceptions.RayActorError):
            self._end(encoder)  # it lives, but its device does not
        self._start_again(encoder)
        self._call()

    def _load(self, encoder: _Encoder) -> Any:
        return encoder.actor.load.remote(self._driver, encoder.spec, self._config, self._model)

    def _start_again(self, encoder: _Encoder) -> None:
        """Have the encoder load its model in its new process, then join."""
        encoder.loading_since_s = time.monotonic()
        life = encoder.life

        def loaded(answer: Future[Any]) -> None:
            if (error := answer.exception()) is not None:
                self._give_up(encoder, error)  # Ray does not make it again, or it cannot load what it could before
            elif encoder.life == life:
                encoder.process = answer.result()
                self._ask(encoder, encoder.actor.join.remote(self._first_stage), partial(self._joined, encoder))

        self._when_done(self._load(encoder), loaded)

    def _joined(self, encoder: _Encoder, _: None) -> None:
        logger.warning("encoder %d is back", encoder.index)
        self._up(encoder)

    def _up(self, encoder: _Encoder) -> None:
        """Give work to an encoder from now on, and watch it."""
        encoder.loading_since_s = None
        self._ask(encoder, encoder.actor.live.remote(), lambda _: None)
        self._shares.note_up(encoder.index)
        self._call()

    def _give_up(self, encoder: _Encoder, error: BaseException) -> None:
        logger.error("encoder %d cannot be started again: %s", encoder.index, in_short(error))
        encoder.is_gone, encoder.loading_since_s = True, None
        if all(one.is_gone for one in self._encoders):
            self._on_end(in_short(error))
        self._call()

    def _check_silence(self) -> None:
        """End an encoder that takes too long: Ray does not see that a process stands still."""
        now_s = time.monotonic()
        for encoder in self._encoders:
            calls = self._shares.calls_of(encoder.index)
            since_s = encoder.called_at_s.get(calls[0], now_s) if calls else now_s
            if now_s - since_s > self._silence_s:
                logger.warning("encoder %d has not answered for %.0f s, and is ended", encoder.index, now_s - since_s)
                encoder.called_at_s.clear()
                self._end(encoder)
            if encoder.loading_since_s is not None and now_s - encoder.loading_since_s > self._start_timeout_s:
                self._give_up(encoder, EncoderDiedError(f"it did not start within {self._start_timeout_s:g} s"))
                ray.kill(encoder.actor)

    def _end(self, encoder: _Encoder) -> None:
        ray.kill(encoder.actor, no_restart=False)
        if encoder.process is not None:
            end_processes([encoder.process], _KILL_S)  # Ray cannot end a stopped process

    def _fail(self, items: Sequence[EncoderItem], error: RayppError) -> None:
        self._tell([ItemFailed(item.key, error) for item in items])

    def _tell(self, events: Sequence[ItemEvent]) -> None:
        if events:
            with self._lock:
                self._events += events
            self._on_event()

    def _when_done(self, ref: Any, then: Callable[[Future[Any]], None]) -> None:
        """Call `then`, in the group's thread, when a call has ended."""
        ref.future().add_done_callback(lambda answer: self._tasks.put(partial(then, answer)))


def _make_actor(plan: EnginePlan, placement: Placement, place: BundlePlace) -> Any:
    options = placement.options_of(
        place,
        plan.encoders.resources,
        max_concurrency=8,  # calls beside the one that encodes: figures, and clients that call the actors themselves
        max_restarts=plan.config.encoder.max_encoder_restarts,
    )
    return ray.remote(EncoderActor).options(**options).remote()

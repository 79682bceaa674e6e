"""The driver's server with real sockets: the test plays the clients and the stages. No Ray, no model."""

from __future__ import annotations

import math
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
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
    decode_driver_message,
    encode_client_message,
)
from raypp.driver.engine_loop import ChannelPipeline, Engine
from raypp.driver.grammars import Grammars
from raypp.driver.server import DriverServer, OpenRequests, open_client_socket
from raypp.driver.stage_health import FailureReports, StageHealth, Witness
from raypp.errors import QueueFullError, StageDiedError
from raypp.grammar.vocabulary import VocabularySource
from raypp.messages import NO_STEP, BlockGroup, OutputBatch, StepPlan, StepResult, pack, unpack
from raypp.request import Request
from raypp.scheduler.limits import SchedulerLimits
from raypp.scheduler.scheduler import Scheduler
from raypp.scheduler.step_budget import RooflineCost, StageTimes, StepPredictor
from raypp.stage.failure import describe_failure
from raypp.step_channel import DriverChannel, StageChannel, Stop
from raypp.testing.local_engine import InlineGrammars
from raypp.tracing import Tracer
from raypp.types import FinishReason, SamplingParams

DEADLINE_S = 20.0
HEARTBEAT_S = 0.05
NUM_STAGES = 2
MAX_BYTES = 1 << 16


class Client:
    """One end of the wire that users are on."""

    def __init__(self, context: zmq.Context, address: str) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(address)
        self.send(OpenClient())

    def send(self, message: ClientMessage) -> None:
        self._socket.send_multipart(encode_client_message(message))

    def add(self, name: str, max_tokens: int = 4, *, begun: Sequence[int] = (), is_streamed: bool = True) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        request = Request(
            name,
            np.array([1, 2, 3], np.int32),
            params,
            0,
            handle=ord(name),
            is_streamed=is_streamed,
            output_token_ids=list(begun),
        )
        self.send(AddRequests([request]))

    def next(self, kind: type[DriverMessage]) -> DriverMessage:
        """Return the next message of a kind; heartbeats and others are skipped."""
        ends = time.monotonic() + DEADLINE_S
        while time.monotonic() < ends:
            if self._socket.poll(100):
                message = decode_driver_message(self._socket.recv_multipart())
                if isinstance(message, kind):
                    return message
        raise AssertionError(f"no {kind.__name__} came")

    def vanish(self) -> None:
        self._socket.close(linger=0)


class Rig:
    """A served engine of two stages that the test plays."""

    def __init__(self, folder: Path, step_timeout_s: float, silence_timeout_s: float) -> None:
        self.context = zmq.Context()
        self.address = f"ipc://{folder}/clients"
        clients = open_client_socket(self.context, self.address)
        channel = DriverChannel([f"ipc://{folder}/0", f"ipc://{folder}/1"], f"ipc://{folder}/r", context=self.context)
        self.stages = [
            StageChannel(index, address, channel.result_address, num_stages=NUM_STAGES)
            for index, address in enumerate(channel.stage_addresses)
        ]
        limits = SchedulerLimits(
            num_stages=NUM_STAGES,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            max_model_len=64,
            block_size=8,
            groups=(BlockGroup(65),),
            enable_prefix_caching=False,
            min_prefill_chunk_tokens=16,
        )
        self.scheduler = Scheduler(limits)
        health = StageHealth(NUM_STAGES, step_timeout_s=step_timeout_s, silence_timeout_s=silence_timeout_s)
        failures = FailureReports()
        times = StageTimes(0.01, 0.01, 1.0, 0.001, 0.01, 1e-5, 1e-6)
        predictor = StepPredictor(RooflineCost(100.0), [times] * NUM_STAGES)
        pipeline = ChannelPipeline(channel, health, failures, predictor)
        grammars = Grammars(InlineGrammars(VocabularySource("", 0, ())), math.inf, pipeline.send_masks)
        engine = Engine(self.scheduler, pipeline, Tracer("driver", enabled=False), None, grammars)
        self.connected = threading.Event()
        self.server = DriverServer(
            engine,
            pipeline,
            clients,
            health,
            failures,
            OpenRequests(max_bytes=MAX_BYTES, max_pixel_bytes=1 << 16),
            heartbeat_s=HEARTBEAT_S,
            on_connected=self.connected.set,
        )
        self._pool = ThreadPoolExecutor(1)
        self.serving: Future[None] = self._pool.submit(self.server.serve)
        self._clients = clients
        self._tell_stages_to_stop = pipeline.close
        self._is_stopped = False

    @property
    def num_unfinished(self) -> int:
        stats = self.scheduler.stats()
        return stats.num_running + stats.num_waiting

    def wait_for(self, condition: Callable[[], bool]) -> None:
        ends = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < ends
            time.sleep(0.01)

    def wait_until_connected(self, stage_index: int) -> None:
        """Wait for a heartbeat: before a stage's connection is made, it takes no plan, as if its queue were full."""
        stage, since = self.stages[stage_index], time.monotonic()
        self.wait_for(lambda: stage.receive(0.0) is None and stage.silence_s < time.monotonic() - since)

    def client(self) -> Client:
        return Client(self.context, self.address)

    def answer(self, until: Callable[[], bool], token_id: int | None = None) -> list[StepPlan]:
        """Play both stages: every step yields a token, its own number if none is given, for every row.

        Return the plans.
        """
        ends, plans = time.monotonic() + DEADLINE_S, list[StepPlan]()
        while not until():
            assert time.monotonic() < ends
            received = self.stages[1].receive(0.02)
            if isinstance(received, memoryview):
                plan = unpack(StepPlan, received)
                plans.append(plan)
                num_rows = len(plan.rows)
                token_ids = np.full((num_rows, 1), plan.step_id if token_id is None else token_id, np.int32)
                result = StepResult(plan.step_id, token_ids, plan.samples.astype(np.int32))
                self.stages[1].send_result(pack(result))
        return plans

    def tell_stages_to_stop(self) -> None:
        if not self._is_stopped:
            self._is_stopped = True
            self._tell_stages_to_stop()

    def close(self) -> None:
        self.server.stop()
        self._pool.shutdown()
        self.tell_stages_to_stop()
        self._clients.close(linger=0)
        self.server.close()
        for stage in self.stages:
            stage.close()
        self.context.destroy(linger=0)


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    rigs = []
    with tempfile.TemporaryDirectory(prefix="raypp") as folder:  # pytest's own are too long for a socket's path

        def make(step_timeout_s: float = DEADLINE_S, silence_timeout_s: float = DEADLINE_S) -> Rig:
            rigs.append(Rig(Path(folder), step_timeout_s, silence_timeout_s))
            return rigs[-1]

        yield make
        for rig in rigs:
            rig.close()


def _collect_tokens(client: Client, handle: int) -> list[int]:
    token_ids: list[int] = []
    while True:
        batch = client.next(OutputBatch)
        assert isinstance(batch, OutputBatch)
        assert batch.handles.tolist() == [handle]
        token_ids += batch.token_ids.tolist()
        if batch.finish_reasons[0]:
            assert batch.finish_reasons[0] == FinishReason.LENGTH
            return token_ids


def test_requests_are_answered_and_stages_and_clients_hear_of_the_driver(make_rig):
    rig = make_rig()
    client = rig.client()
    assert rig.connected.wait(DEADLINE_S)
    client.add("a")
    with ThreadPoolExecutor(1) as pool:
        tokens = pool.submit(_collect_tokens, client, ord("a"))
        rig.answer(tokens.done)
    assert len(tokens.result()) == 4
    client.next(Alive)
    while isinstance(rig.stages[0].receive(2 * HEARTBEAT_S), memoryview):
        pass  # plans of steps that were under way
    rig.wait_for(lambda: rig.stages[0].receive(0.0) is None and rig.stages[0].silence_s < 2 * HEARTBEAT_S)
    rig.server.stop()
    rig.serving.result(DEADLINE_S)
    rig.tell_stages_to_stop()
    assert rig.stages[1].receive(DEADLINE_S) == Stop()


def test_a_request_that_was_begun_elsewhere_goes_on_after_its_tokens(make_rig):
    rig = make_rig()
    client = rig.client()
    client.add("a", max_tokens=10, begun=[50, 51, 52])
    with ThreadPoolExecutor(1) as pool:
        tokens = pool.submit(_collect_tokens, client, ord("a"))
        plans = rig.answer(tokens.done)
    assert len(tokens.result()) == 7, "outputs name new tokens only"
    assert plans[0].start_token_ids.tolist() == [1, 2, 3, 50, 51, 52]
    assert plans[0].start_prompt_lens.tolist() == [3]


def test_what_goes_first_is_before_the_smallest_priority(make_rig):
    rig = make_rig()
    client = rig.client()
    params = SamplingParams(max_tokens=1, temperature=0.0)
    requests = [
        Request(name, np.array([ord(name)], np.int32), params, 0, handle=ord(name), is_streamed=True) for name in "abc"
    ]
    places = [{}, {"priority": -(2**31)}, {"priority": 9, "goes_first": True}]
    client.send(AddRequests([replace(r, **place) for r, place in zip(requests, places, strict=True)]))
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(client.next, OutputBatch)
        plans = rig.answer(ended.done)
    assert plans[0].start_token_ids.tolist() == [ord("c"), ord("b"), ord("a")]


def test_what_can_never_run_is_rejected_and_the_rest_goes_on(make_rig):
    rig = make_rig()
    client = rig.client()
    client.send(
        AddRequests(
            [
                Request(
                    "long",
                    np.ones(64, np.int32),
                    SamplingParams(max_tokens=4, temperature=0.0),
                    0,
                    handle=7,
                    is_streamed=True,
                )
            ]
        )
    )
    rejected = client.next(Rejected)
    assert isinstance(rejected, Rejected)
    assert rejected.handle == 7
    client.add("a")
    with ThreadPoolExecutor(1) as pool:
        tokens = pool.submit(_collect_tokens, client, ord("a"))
        rig.answer(tokens.done)


def test_a_client_hears_that_the_engine_is_full_and_may_come_again(make_rig):
    rig = make_rig()
    client = rig.client()
    names = [chr(ord("a") + index) for index in range(16)]  # 4 KiB each, and a little
    for name in names:
        client.add(name)
    rejected = client.next(Rejected)
    assert isinstance(rejected, Rejected)
    assert rejected.handle == ord(names[-1])
    assert isinstance(rejected.error, QueueFullError)
    assert f"max_waiting_bytes = {MAX_BYTES}" in str(rejected.error)
    assert rejected.error.retry_after_s > 0
    rig.answer(lambda: not rig.num_unfinished)
    client.add(names[-1])
    rig.answer(lambda: rig.scheduler.stats().num_generated_tokens == 16 * 4)


def test_abort_and_stats(make_rig):
    rig = make_rig()
    client = rig.client()
    client.add("a", max_tokens=50)
    client.send(StatsCall(5))
    reply = client.next(StatsReply)
    assert isinstance(reply, StatsReply)
    assert reply.call_id == 5
    assert len(reply.stats["stage_silent_s"]) == NUM_STAGES
    client.send(AbortRequests(["a", "unknown"]))
    batch = client.next(OutputBatch)
    assert isinstance(batch, OutputBatch)
    assert batch.finish_reasons.tolist() == [FinishReason.ABORT]
    rig.answer(lambda: not rig.scheduler.num_in_flight)


@pytest.mark.parametrize("leaving", ["politely", "without a word"])
def test_the_requests_of_a_client_that_leaves_are_aborted(make_rig, leaving):
    rig = make_rig()
    stays, leaves = rig.client(), rig.client()
    stays.add("a", max_tokens=50)
    leaves.add("b", max_tokens=50)
    rig.wait_for(lambda: rig.num_unfinished == 2)
    if leaving == "politely":
        leaves.send(CloseClient())
    else:
        leaves.vanish()
    rig.answer(lambda: rig.num_unfinished == 1)
    with ThreadPoolExecutor(1) as pool:
        tokens = pool.submit(_collect_tokens, stays, ord("a"))
        rig.answer(tokens.done)
    assert len(tokens.result()) == 50


def test_a_stage_that_fails_says_why_and_every_client_hears_it(make_rig):
    rig = make_rig()
    clients = [rig.client(), rig.client()]
    for client in clients:
        client.add("a")
        client.next(Alive)
    # The neighbour notices first; the stage itself knows better.
    gone = StageDiedError("stage 1 is gone", stage_index=1)
    rig.stages[0].send_error(describe_failure(0, 1, gone))
    rig.stages[1].send_error(describe_failure(1, 1, ValueError("out of luck")))
    for client in clients:
        dead = client.next(EngineDead)
        assert isinstance(dead, EngineDead)
        assert isinstance(dead.error, StageDiedError)
        assert dead.error.stage_index == 1
        assert "out of luck" in str(dead.error)
    with pytest.raises(StageDiedError, match="out of luck"):
        rig.serving.result(DEADLINE_S)


def test_a_reported_death_ends_it_at_once(make_rig):
    rig = make_rig()
    client = rig.client()
    client.next(Alive)
    rig.server.fail(StageDiedError("stage 0 died", stage_index=0), Witness.DEATH)
    assert isinstance(client.next(EngineDead), EngineDead)
    with pytest.raises(StageDiedError, match="stage 0 died"):
        rig.serving.result(DEADLINE_S)


def test_a_death_is_told_at_once_while_a_plan_waits_for_the_dead_stage(make_rig):
    rig = make_rig()
    client = rig.client()
    client.next(Alive)
    rig.wait_until_connected(1)
    rig.stages[0].close()
    client.add("a")
    assert isinstance(rig.stages[1].receive(DEADLINE_S), memoryview)  # so it is stage 0 that is waited for
    rig.server.fail(StageDiedError("stage 0 died", stage_index=0), Witness.DEATH)
    dead = client.next(EngineDead)
    assert isinstance(dead, EngineDead)
    assert isinstance(dead.error, StageDiedError)
    with pytest.raises(StageDiedError, match="stage 0 died"):
        rig.serving.result(DEADLINE_S)


def test_each_client_hears_what_of_its_own_was_in_flight_and_what_came_before_that(make_rig):
    rig = make_rig()
    clients = [rig.client(), rig.client(), rig.client()]
    for client, name in zip(clients, "abc", strict=True):
        client.next(Alive)
        if name != "c":
            client.add(name, max_tokens=50, is_streamed=False)
    rig.answer(lambda: rig.scheduler.stats().num_generated_tokens >= 20)
    rig.server.fail(StageDiedError("stage 0 died", stage_index=0), Witness.DEATH)
    assert isinstance(rig.serving.exception(DEADLINE_S), StageDiedError)
    num_tokens = 0
    for client, name in zip(clients, "abc", strict=True):
        dead = None
        while dead is None:
            message = client.next(OutputBatch | EngineDead)
            if isinstance(message, OutputBatch):
                num_tokens += len(message.token_ids)
            else:
                dead = message
        assert dead.in_flight == ([] if name == "c" else [ord(name)])
    counted = rig.scheduler.stats().num_generated_tokens
    assert num_tokens == counted, "a token that was held back would be computed again, and seem never to have come"


def test_an_error_is_the_last_that_a_client_hears_of_a_request(make_rig):
    rig = make_rig()
    client = rig.client()
    client.add("a", max_tokens=50, is_streamed=False)
    rig.answer(lambda: rig.scheduler.stats().num_generated_tokens >= 5)
    rig.answer(lambda: rig.num_unfinished == 0, token_id=-1)  # as where logits are not finite
    num_tokens = 0
    while isinstance(message := client.next(OutputBatch | Rejected), OutputBatch):
        assert message.finish_reasons.tolist() == [FinishReason.NONE]
        num_tokens += len(message.token_ids)
    assert message.handle == ord("a")
    assert num_tokens == rig.scheduler.stats().num_generated_tokens
    client.add("b", max_tokens=3, is_streamed=False)
    rig.wait_for(lambda: rig.num_unfinished == 1)
    rig.answer(lambda: rig.num_unfinished == 0)
    while not (batch := client.next(OutputBatch)).finish_reasons.any():
        assert batch.handles.tolist() == [ord("b")]


def test_a_request_without_a_row_or_that_has_ended_is_not_in_flight(make_rig):
    rig = make_rig()
    client = rig.client()
    prompt, params = np.ones(3, np.int32), SamplingParams(max_tokens=50, temperature=0.0)
    client.send(
        AddRequests([Request(name, prompt, params, 0, handle=ord(name), is_streamed=True) for name in "abcdefghi"])
    )
    rig.wait_for(lambda: rig.scheduler.stats().num_running == 8)  # there are as many rows
    client.send(AbortRequests(["a"]))
    rig.wait_for(lambda: rig.num_unfinished == 8)
    rig.server.fail(StageDiedError("stage 0 died", stage_index=0), Witness.DEATH)
    dead = client.next(EngineDead)
    assert isinstance(dead, EngineDead)
    assert sorted(dead.in_flight) == [ord(name) for name in "bcdefgh"]


def test_steps_in_flight_without_progress_are_a_frozen_stage(make_rig):
    rig = make_rig(step_timeout_s=1.5)  # on a busy machine stage 0 would be silent for as long as 0.5 s, too
    client = rig.client()
    started = time.monotonic()
    client.add("a")
    while not rig.serving.done():
        assert time.monotonic() - started < DEADLINE_S
        rig.stages[0].send_heartbeat(0)
        rig.stages[1].send_heartbeat(NO_STEP)
        time.sleep(0.05)
    with pytest.raises(StageDiedError, match="frozen") as caught:
        rig.serving.result()
    assert caught.value.stage_index == 1
    assert isinstance(client.next(EngineDead), EngineDead)


def test_a_stage_that_falls_silent_while_nothing_runs_is_frozen(make_rig):
    rig = make_rig(silence_timeout_s=0.5)
    client = rig.client()
    rig.wait_for(rig.connected.is_set)
    started = time.monotonic()
    while not rig.serving.done():
        assert time.monotonic() - started < DEADLINE_S
        rig.stages[0].send_heartbeat(NO_STEP)
        time.sleep(0.05)
    with pytest.raises(StageDiedError, match="nothing has been heard") as caught:
        rig.serving.result()
    assert caught.value.stage_index == 1
    assert isinstance(client.next(EngineDead), EngineDead)

"""A request that one engine has begun and another goes on with has the same text as if nothing had happened.

TEST_HANDED_OVER is how many runs, with other deaths, there are of each cell.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import zmq
from answer_comparison import Comparison
from handing_over import Answer, Asked, MortalEngines
from request_kinds import requests_of_all_kinds, requests_with_pictures, tokenizer

from raypp.api.running_request import logprobs_per_request
from raypp.client_messages import (
    AddRequests,
    EngineDead,
    OpenClient,
    Rejected,
    decode_driver_message,
    encode_client_message,
)
from raypp.config.engine_config import EngineConfig
from raypp.messages import OutputBatch
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.request import Request
from raypp.testing import LocalEngine, launch_in_threads
from raypp.types import FinishReason

NUM_RUNS = int(os.environ.get("TEST_HANDED_OVER", "1"))
NUM_DEATHS = 5
SMALL = {"block_size": 4, "max_num_batched_tokens": 40, "min_prefill_chunk_tokens": 8}
TIGHT = {**SMALL, "max_num_seqs": 10, "num_kv_blocks": 130, "max_model_len": 200, "cpu_kv_bytes": 1 << 22}
NGRAM = {"method": "ngram", "min_n": 1, "num_speculative_tokens": 3}
HEAD = {"method": "auto", "model": "tiny-eagle3", "num_speculative_tokens": 3}
CELLS: dict[str, list[dict[str, Any]]] = {
    "three stages": [{"num_stages": 3, "enable_prefix_caching": False}],
    "other stages in each life, and preemptions": [{"num_stages": n, **TIGHT} for n in (3, 1, 4, 2)],
    "n-grams, recorded steps": [{"num_stages": 2, "mode": "full", "speculative": NGRAM, **SMALL}],
    "a head": [{"num_stages": 2, "speculative": HEAD, **SMALL}],
    "with a head and without": [{"num_stages": 2, "speculative": HEAD, **TIGHT}, {"num_stages": 1, **TIGHT}],
}

IN_SOAK = ("three stages", "n-grams, recorded steps", "a head")  # others have as much


def engines_of(model: str, settings: Sequence[dict[str, Any]], lateness: random.Random | None) -> list[Any]:
    fixed = {"stage_num_threads": 1, "max_num_seqs": 24}
    plans = [plan_engine(EngineConfig.from_flat(model, **(fixed | one)), Hardware(1)) for one in settings]
    return [lambda plan=plan: LocalEngine(plan, mask_lateness=lateness) for plan in plans]


def undisturbed(model: str, asked: Sequence[Asked]) -> list[Answer]:
    engines = MortalEngines(engines_of(model, [{}], None), tokenizer().decode, random.Random(0))
    return engines.answer(asked)


@pytest.fixture(scope="module")
def expected() -> list[Answer]:
    answers = undisturbed("tiny", requests_of_all_kinds())
    by_name = {answer.asked.name: answer for answer in answers}
    lengths = {name: len(answer.token_ids) for name, answer in by_name.items()}
    assert 9 <= lengths["stop tokens"] < 48, "it should stop in the midst of others"
    assert 2 < lengths["stop strings"] < 48
    assert 25 <= lengths["min tokens"] < 70
    assert min(lengths["json"], lengths["regex"]) > 9
    return answers


@pytest.mark.parametrize(
    "name", [name if name not in IN_SOAK else pytest.param(name, marks=pytest.mark.full) for name in CELLS]
)
def test_texts_are_those_of_an_engine_that_lives(name: str, expected: list[Answer]) -> None:
    comparison, met = Comparison(), Counter[str]()
    for run in range(NUM_RUNS):
        rng = random.Random(f"{name} {run}")
        lateness = rng if run % 2 == list(CELLS).index(name) % 2 else None
        engines = MortalEngines(
            engines_of("tiny", CELLS[name], lateness), tokenizer().decode, rng, num_deaths=NUM_DEATHS
        )
        answers = engines.answer(requests_of_all_kinds())
        met["handed over"] += engines.num_handed_over
        met["forgotten"] += engines.num_forgotten
        met["handed over again"] += sum(answer.num_lives > 2 for answer in answers)
        comparison.compare(answers, expected)
    for what in ("handed over", "forgotten", "handed over again"):
        assert met[what] > 9 * NUM_RUNS, met
    print(f"\n{name}: {comparison.num_tokens} tokens are equal, {comparison.num_excused} near-ties excused")
    assert comparison.num_excused <= max(1, comparison.num_tokens // 1000)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"num_stages": 3, **SMALL}, marks=pytest.mark.full),
        {"num_stages": 2, "speculative": NGRAM, **TIGHT},
    ],
)
def test_texts_about_pictures_are_those_of_an_engine_that_lives(settings: dict[str, Any]) -> None:
    asked = requests_with_pictures()
    right, comparison, num_handed_over = undisturbed("tiny-vl", asked), Comparison(), 0
    for run in range(NUM_RUNS):
        rng = random.Random(f"pictures {run}")
        engines = MortalEngines(
            engines_of("tiny-vl", [settings], None), tokenizer().decode, rng, num_deaths=NUM_DEATHS, most_turns=24
        )
        answers = engines.answer(asked)
        num_handed_over += engines.num_handed_over
        comparison.compare(answers, right, excuses=False)
    assert num_handed_over > 5 * NUM_RUNS


class WireClient:
    """Sends requests to a driver in threads, with what there is of them, and takes in what comes."""

    def __init__(self, address: str, answers: Sequence[Answer]) -> None:
        self.answers = answers
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(address)
        requests = [
            Request(
                answer.asked.name,
                answer.asked.prompt,
                answer.params_of_next_life(),
                answer.asked.params.seed or 0,
                answer.asked.eos_token_ids,
                handle=handle,
                bad_word_token_ids=answer.asked.bad_words,
                priority=answer.asked.priority,
                is_streamed=handle % 2 == 0,
                cache_salt=answer.asked.cache_salt,
                output_token_ids=list(answer.token_ids),
            )
            for handle, answer in enumerate(answers)
            if not answer.finish_reason
        ]
        for message in (OpenClient(), AddRequests(requests)):
            self._socket.send_multipart(encode_client_message(message))

    @property
    def unfinished(self) -> set[int]:
        return {handle for handle, answer in enumerate(self.answers) if not answer.finish_reason}

    def read(self) -> EngineDead | None:
        """Take in the next message; return it if it is the last one."""
        assert self._socket.poll(20_000), "the driver is silent"
        message = decode_driver_message(self._socket.recv_multipart())
        assert not isinstance(message, Rejected), message
        if isinstance(message, OutputBatch):
            ends = np.cumsum(message.num_tokens)[:-1]
            columns = message.handles.tolist(), np.split(message.token_ids, ends), message.finish_reasons.tolist()
            stops, logprobs = message.stop_token_ids.tolist(), logprobs_per_request(message)
            for handle, token_ids, reason, stop, (own, of_prompt) in zip(*columns, stops, logprobs, strict=True):
                answer = self.answers[handle]
                answer.token_ids += token_ids.tolist()
                answer.finish_reason, answer.stop_token_id = FinishReason(reason), stop
                for lists, taken in ((own, answer.logprobs), (of_prompt, answer.prompt_logprobs)):
                    if lists is not None:
                        taken += [dict(zip(ids, v, strict=True)) for ids, v in zip(*lists[:2], strict=True)]
        return message if isinstance(message, EngineDead) else None

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def test_the_wire_carries_what_another_driver_needs(expected: list[Answer]) -> None:
    """Real drivers, and processes for grammars; the first engine dies."""
    with_texts = {"stop strings"}  # the client's affair, and this one has no tokenizer
    right = [answer for answer in expected if answer.asked.name not in with_texts]
    answers = [Answer(answer.asked) for answer in right]
    config = EngineConfig.from_flat("tiny", num_stages=2, stage_num_threads=1, max_num_seqs=24, speculative=NGRAM)
    for life in range(2):
        engine = launch_in_threads(config)
        client = WireClient(engine.client_address, answers)
        try:
            dead, is_killed = None, False
            while dead is None and client.unfinished:
                if not life and not is_killed and sum(len(answer.token_ids) for answer in answers) > 60:
                    engine.kill_stage(1)
                    is_killed = True
                dead = client.read()
            assert (dead is None) == (life == 1)
            if dead is not None:
                assert dead.in_flight
                assert client.unfinished.issuperset(dead.in_flight)
        finally:
            client.close()
            engine.close()
    Comparison().compare(answers, right)

"""Encoder actors in an engine: the same tokens as in one process, and what happens when one of them goes.

ENCODER_KILLS=20 runs the whole campaign of kills; by default there is one, as CI has time for.
"""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress

import numpy as np
import pytest
from engine_listener import EngineListener
from hf_vision import FIRST_TEXT_TOKEN, make_vision_checkpoint, picture, picture_prompt
from leftovers import wait_until_gone
from raw_client import WAIT_S, RawClient

from raypp.actors.engine_actors import EngineHandle, launch_engine
from raypp.config.engine_config import EngineConfig
from raypp.errors import EncoderDiedError, RequestError
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.prompt_items import EncoderItem, PromptItems
from raypp.testing import LocalEngine
from raypp.types import SamplingParams

pytestmark = pytest.mark.ray

NUM_KILLS = int(os.environ.get("ENCODER_KILLS", "1"))
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
SETTINGS = {
    "max_model_len": 256,
    "block_size": 8,
    "num_kv_blocks": 200,
    "max_num_batched_tokens": 24,
    "min_prefill_chunk_tokens": 4,
    "max_num_seqs": 8,
    "skip_tokenizer_init": True,
    "heartbeat_s": 0.2,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_vision_checkpoint(3, tmp_path_factory.mktemp("vl"), min_layers=4)


@pytest.fixture(scope="module")
def prompts(path):
    """Return prompts with none to four pictures of several sizes; some pictures come more than once."""
    text = [FIRST_TEXT_TOKEN + i for i in range(20)]
    pictures = [picture(seed, *size) for seed, size in enumerate(((40, 40), (90, 30), (17, 60), (64, 64), (33, 47)))]
    return [
        picture_prompt(path, parts)
        for parts in (
            [text[:5], pictures[0], text[5:9]],
            [text[2:9]],
            [pictures[1], text[:3], pictures[2], pictures[0], text[3:6]],
            [text],
            [text[:2], pictures[3], pictures[4], pictures[3], text[9:]],
        )
    ]


@pytest.fixture(scope="module")
def in_process(path):
    """Return a function from prompts to what an engine in this process makes of them."""
    config = EngineConfig.from_flat(str(path), num_stages=2, device="cpu", **SETTINGS)
    engine = LocalEngine(plan_engine(config, Hardware.of_this_machine()))

    def generate(prompts):
        requests = [engine.submit(prompt, GREEDY, items=items) for prompt, items in prompts]
        while engine.has_unfinished:
            engine.step()
        return [request.output_token_ids for request in requests]

    return generate


@pytest.fixture(scope="module")
def expected(in_process, prompts):
    return in_process(prompts)


def launch(path, **settings) -> EngineHandle:
    return launch_engine(EngineConfig.from_flat(str(path), device="cpu", **(SETTINGS | settings)))


@pytest.fixture(scope="module")
def engine(local_ray, path):
    """Return an engine of two stages and one encoder."""
    handle = launch(path, num_stages=2, encoder_timeout_s=6.0, max_encoder_restarts=8 + NUM_KILLS)
    yield handle
    handle.close()


@pytest.fixture(scope="module")
def client(engine):
    """Return the engine's client: its socket has no name any more when one has connected."""
    with RawClient(engine.client_address) as client:
        yield client


def unseen(path, seed: int) -> tuple[list[int], PromptItems]:
    """Return a prompt with a picture of its own."""
    return picture_prompt(path, [[FIRST_TEXT_TOKEN], picture(seed, 60, 40), [FIRST_TEXT_TOKEN + 1]])


def encoder_pid(engine) -> int:
    [pid] = engine.processes()["encoders"]
    return pid


def test_tokens_equal_those_in_one_process(engine, client, prompts, expected):
    for _ in range(2):
        handles = [client.add(prompt, items) for prompt, items in prompts]
        client.wait(handles)
        assert not client.errors
        assert [client.tokens[handle] for handle in handles] == expected
    stats = client.stats()
    [encoder] = stats["encoders"]["actors"]
    assert stats["encoders"]["num_up"] == 1
    assert stats["num_waiting_for_items"] == 0
    assert encoder["num_items"] == 5  # each picture once, however often it came
    assert stats["num_hit_items"] == stats["num_query_items"] - 5
    assert encoder["hit_rate"] > 0
    assert not encoder["writes_to_first_stage"]  # which has no GPU
    assert stats["num_encoder_items"] == 5


def test_text_goes_on_while_an_encoder_stands_still_and_pictures_when_it_is_back(engine, client, path, prompts):
    fresh = unseen(path, 77)
    stopped = encoder_pid(engine)
    os.kill(stopped, signal.SIGSTOP)
    try:
        with_picture = client.add(*fresh)
        texts = [client.add(prompt, None) for prompt, items in prompts if items is None]
        client.wait(texts)
        assert client.stats()["num_waiting_for_items"] == 1
    finally:
        with suppress(ProcessLookupError):  # on a machine that is so slow, it counted as frozen
            os.kill(stopped, signal.SIGKILL)  # in the middle of its work
    more = [client.add(prompt, None) for prompt, items in prompts if items is None]
    client.wait(more)
    client.wait([with_picture])
    assert not client.errors
    assert len(client.tokens[with_picture]) == GREEDY.max_tokens
    again = client.add(*fresh)
    client.wait([again])
    assert client.tokens[again] == client.tokens[with_picture]
    assert encoder_pid(engine) != stopped
    stats = client.stats()
    assert stats["encoders"]["num_deaths"] == 1
    assert stats["num_encoder_items"] == 6  # what was counted before the death counts


def test_a_picture_that_cannot_be_encoded_fails_its_own_request(engine, client, path, prompts):
    prompt, items = picture_prompt(path, [[FIRST_TEXT_TOKEN], picture(5, 40, 40), [FIRST_TEXT_TOKEN]])
    [item] = items.items
    narrow = EncoderItem.of(np.ascontiguousarray(item.patches[:, :-1]), item.grid_thw, item.num_tokens)
    broken = PromptItems((narrow,), items.starts, items.merge_size)
    bad, good = client.add(prompt, broken), client.add(prompt, items)
    client.wait([bad, good])
    assert isinstance(client.errors[bad], RequestError)
    assert "an image" in str(client.errors[bad])
    assert len(client.tokens[good]) == GREEDY.max_tokens
    assert client.stats()["encoders"]["num_up"] == 1


def test_kills_at_any_moment_cost_nothing_but_time(engine, client, path, prompts, in_process, record_property):
    """Pictures and text come in, an encoder dies at a random moment, and everything ends as if it had not."""
    rng, slowest_s = random.Random(0), 0.0
    for kill in range(NUM_KILLS):
        seeds = range(100 + 4 * kill, 104 + 4 * kill)
        fresh = [
            picture_prompt(path, [[FIRST_TEXT_TOKEN], picture(seed, 60, 40), [FIRST_TEXT_TOKEN + 1]]) for seed in seeds
        ]
        texts = [prompt for prompt in prompts if prompt[1] is None]
        right = in_process([*fresh, *texts])
        pid = encoder_pid(engine)
        with_pictures = [client.add(*prompt) for prompt in fresh]
        ends = time.monotonic() + rng.random() * 0.1
        while time.monotonic() < ends:
            client.pump()
        with suppress(ProcessLookupError):  # on a machine that is so slow, it counted as frozen
            os.kill(pid, signal.SIGKILL)
        started = time.monotonic()
        others = [client.add(*prompt) for prompt in texts]
        client.wait(others)
        client.wait(with_pictures)
        slowest_s = max(slowest_s, time.monotonic() - started)
        assert not set(client.errors) & {*with_pictures, *others}
        assert [client.tokens[handle] for handle in (*with_pictures, *others)] == right
        ends = time.monotonic() + WAIT_S
        while encoder_pid(engine) == pid or not client.stats()["encoders"]["num_up"]:
            assert time.monotonic() < ends, "it did not come back"
            client.pump()
    record_property("slowest_s", slowest_s)
    print(f"{NUM_KILLS} kills; all requests ended right, the slowest {slowest_s:.1f} s after the kill")


@pytest.mark.full
def test_an_encoder_that_hangs_is_ended_and_started_again(engine, client, path):
    stopped = encoder_pid(engine)
    num_deaths = client.stats()["encoders"]["num_deaths"]
    os.kill(stopped, signal.SIGSTOP)
    fresh = client.add(*unseen(path, 78))
    client.wait([fresh])
    assert not client.errors.get(fresh)
    assert len(client.tokens[fresh]) == GREEDY.max_tokens
    assert client.stats()["encoders"]["num_deaths"] == num_deaths + 1
    assert not wait_until_gone([stopped], WAIT_S)


@pytest.mark.full
def test_two_encoders_share_the_pictures_and_without_any_text_goes_on(local_ray, path, prompts, expected):
    """With the last encoder the engine is started again; when its restarts are used up, text goes on."""
    listener = EngineListener()
    restarts = {"max_encoder_restarts": 0, "max_engine_restarts": 1}
    handle = launch(path, num_stages=1, num_encoders=2, max_images_per_batch=1, **restarts)
    try:
        handle.watch(listener)
        first = handle.processes()["encoders"]
        listener.hears("lost", "back", after=lambda: [os.kill(pid, signal.SIGKILL) for pid in first])
        assert "all encoders" in str(listener.errors[0])
        with RawClient(handle.client_address) as client:
            handles = [client.add(prompt, items) for prompt, items in prompts]
            client.wait(handles)
            assert [client.tokens[h] for h in handles] == expected
            counted = client.stats()["encoders"]["actors"]
            assert sum(stats["num_items"] for stats in counted) == 5
            assert all(stats["num_items"] for stats in counted)
            processes = handle.processes()
            for pid in processes["encoders"]:
                os.kill(pid, signal.SIGKILL)
            refused = client.add(*unseen(path, 79))
            handles = [client.add(prompt, items) for prompt, items in prompts]
            client.wait([refused, *handles])
            assert isinstance(client.errors[refused], EncoderDiedError)
            assert [client.tokens[h] for h in handles] == expected  # the first stage still has these pictures
    finally:
        handle.close()
    assert not wait_until_gone([*processes["encoders"], *processes["stages"], processes["driver"]], WAIT_S)

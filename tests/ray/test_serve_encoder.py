"""The Serve deployment in front of encoder actors: embeddings, caches, backpressure, deaths."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import signal

import httpx
import numpy as np
import pytest
import torch
from hf_vision import FIRST_TEXT_TOKEN, make_vision_checkpoint, picture, picture_prompt
from PIL import Image
from raw_client import WAIT_S, RawClient
from ray import serve
from serving import deploy, metric, serving

from raypp.actors.engine_actors import launch_engine
from raypp.config.engine_config import EngineConfig
from raypp.errors import QueueFullError, RequestError
from raypp.models.config import load_model_config
from raypp.models.registry import build_encoder
from raypp.models.weights import CheckpointWeights
from raypp.prompt_items import EncoderItem
from serve_app.replica import DEPLOYMENT_NAME, ServedPictures, encoder_deployment

pytestmark = pytest.mark.ray

APP = "pictures"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_vision_checkpoint(3, tmp_path_factory.mktemp("vl"), min_layers=2)


@pytest.fixture(scope="module")
def engine(local_ray, path):
    settings = {"max_model_len": 256, "num_kv_blocks": 64, "max_num_seqs": 8, "skip_tokenizer_init": True}
    handle = launch_engine(EngineConfig.from_flat(str(path), device="cpu", **settings))
    yield handle
    handle.close()


@pytest.fixture(scope="module")
def url(local_ray):
    """Return the address of a running Serve."""
    with serving() as url:
        yield url


@pytest.fixture(scope="module")
def deployed(engine, url):
    """Return the deployment's handle: one call at a time, and one that waits."""
    deployment = encoder_deployment(num_cpus=0.01, max_ongoing=1, max_queued=1)
    serve.run(deployment.bind(), name=APP, route_prefix=None)
    return serve.get_deployment_handle(DEPLOYMENT_NAME, APP)


@pytest.fixture(scope="module")
def gate(engine, deployed):
    return ServedPictures(deployed, "an engine", engine.encoder_actors)


def test_pictures_that_passed_the_gate_are_not_encoded_again(engine, gate, path):
    prompt, items = picture_prompt(path, [[FIRST_TEXT_TOKEN], picture(1, 40, 40), picture(2, 90, 30)])
    asyncio.run(gate.pass_on(items.items))
    with RawClient(engine.client_address) as client:
        request = client.add(prompt, items)
        client.wait([request])
        assert not client.errors
        [counted] = client.stats()["encoders"]["actors"]
    assert (counted["num_items"], counted["cache_hits"]) == (2, 2)


def test_embeddings_are_those_of_the_tower(gate, deployed, path):
    _, items = picture_prompt(path, [picture(1, 40, 40), picture(3, 17, 60), picture(1, 40, 40)])
    config = load_model_config(path)
    tower = build_encoder(config, dtype=torch.float32, device=torch.device("cpu"), source=CheckpointWeights(path))
    asyncio.run(gate.pass_on(items.items))
    found = deployed.encode.remote(list(items.items)).result()
    with torch.inference_mode():
        batch = tower.select_items(items.items, range(3))
        expected = tower.split_output(tower.eager_forward(batch), batch)
    for rows, encoded in zip(found, expected, strict=True):
        np.testing.assert_allclose(rows, encoded.rows.numpy(), atol=2e-4, rtol=1e-4)
    assert deployed.health.remote().result() == {"an engine": [True]}


def test_a_picture_at_fault_is_named(gate, deployed, path):
    _, items = picture_prompt(path, [picture(4, 40, 40)])
    [item] = items.items
    narrow = EncoderItem.of(np.ascontiguousarray(item.patches[:, :-1]), item.grid_thw, item.num_tokens)
    asyncio.run(gate.pass_on([narrow]))  # its request will be told
    with pytest.raises(Exception, match="cannot take the image") as caught:
        deployed.encode.remote([narrow]).result()
    assert isinstance(caught.value, RequestError) or "RequestError" in str(caught.value)


def test_too_many_pictures_are_refused_and_a_death_is_the_engines_affair(engine, gate, path):
    [pid] = engine.processes()["encoders"]
    os.kill(pid, signal.SIGSTOP)

    async def many() -> list[BaseException | None]:
        prompts = [picture_prompt(path, [picture(50 + index, 40, 40)]) for index in range(6)]
        waiting = [asyncio.ensure_future(gate.pass_on(items.items)) for _, items in prompts]
        refused = {task for task in (await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED))[0]}
        assert all(isinstance(task.exception(), QueueFullError) for task in refused)
        os.kill(pid, signal.SIGKILL)
        return await asyncio.gather(*waiting, return_exceptions=True)

    outcomes = asyncio.run(many())
    assert any(isinstance(outcome, QueueFullError) for outcome in outcomes)
    assert all(outcome is None or isinstance(outcome, QueueFullError) for outcome in outcomes)
    assert any(outcome is None for outcome in outcomes)


@pytest.mark.full
def test_a_conversation_with_a_picture_over_http(url):
    """The whole way: HTTP app, deployment, encoder actor, driver, stages."""
    data = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(data, "PNG")
    address = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
    content = [
        {"type": "image_url", "image_url": {"url": address}},
        {"type": "text", "text": "What is in the picture?"},
    ]
    deploy({"model": "tiny-vl", "num_stages": 1, "max_num_seqs": 8, "kv_cache_bytes": 16 << 20})
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0}
    answers = [httpx.post(f"{url}/v1/chat/completions", json=body, timeout=WAIT_S) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    first, second = (answer.json() for answer in answers)
    assert first["choices"][0]["message"]["content"] == second["choices"][0]["message"]["content"]
    assert first["usage"]["prompt_tokens"] > 8
    assert metric(url, "raypp_encoder_items_total") == 1
    assert metric(url, "raypp_encoder_cache_hits_total") >= 1  # the door had it encoded before its engine asked
    engines = serve.get_deployment_handle(DEPLOYMENT_NAME, "raypp").health.remote().result()
    assert list(engines.values()) == [[True]]
